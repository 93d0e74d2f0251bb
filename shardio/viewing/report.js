"use strict";
(() => {
  const PAGE = 25;
  const { splits, classes } = JSON.parse(document.getElementById("data").textContent);
  const [LABEL, NAME, CALLED, COUNTS, SHOWN] = [0, 1, 2, 3, 4];

  // Texts of others only ever become text: nothing here parses HTML.
  function make(name, attributes = {}, ...children) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  const theme = document.getElementById("theme");
  const isDark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const tell = () => theme.setAttribute("aria-pressed", isDark());
  theme.hidden = false;
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    tell();
  });
  tell();

  const browser = document.getElementById("browser");
  const search = document.getElementById("search");
  const pictures = document.getElementById("pictures");
  const table = document.getElementById("table");
  const pages = document.getElementById("pages");
  const most = splits.map((_, split) => classes.reduce((most, one) => Math.max(most, one[COUNTS][split]), 1));
  const texts = classes.map((one) =>
    [one[LABEL], one[NAME], one[CALLED], ...one[SHOWN].map(([, key]) => key)].join("\n").toLowerCase());
  const columns = [
    { title: "label", kind: "label", key: (one) => one[LABEL] },
    { title: "class", kind: "name", key: (one) => one[CALLED] || one[NAME] },
    ...splits.map((title, split) => ({ title, kind: "count right", key: (one) => one[COUNTS][split] })),
  ];
  let sorted = 0, up = true, page = 0, found = [];

  function choose() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const key = columns[sorted].key;
    found = [];
    for (let i = 0; i < classes.length; i++) {
      if (words.every((word) => texts[i].includes(word))) found.push(classes[i]);
    }
    const sign = up ? 1 : -1;
    const order = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
    found.sort((a, b) => sign * order(key(a), key(b)) || a[LABEL] - b[LABEL]);
    page = 0;
    show();
  }

  // Narrow pages lay the table's rows out anew. The roles say that it stays a table.
  function row(one) {
    const name = make("td", { role: "cell", class: "name" }, make("bdi", {}, one[CALLED] || one[NAME]));
    if (one[CALLED] && one[NAME] !== one[CALLED]) name.append(make("bdi", { class: "called" }, one[NAME]));
    const cells = [make("td", { role: "cell", class: "label" }, String(one[LABEL])), name];
    one[COUNTS].forEach((count, split) => {
      const bar = make("div", { class: "bar" });
      bar.style.width = `${(100 * count) / most[split]}%`;
      cells.push(make("td", { role: "cell", class: "count right" }, count.toLocaleString("en"), bar));
    });
    if (pictures.checked) {
      const items = one[SHOWN].map(([index, key, source]) => {
        const image = make("img", { src: source, alt: `sample ${index}, ${key}`, title: `sample ${index}\n${key}` });
        image.addEventListener("load", () => image.classList.toggle("tiny", image.naturalHeight < 72));
        return make("li", {}, image);
      });
      cells.push(make("td", { role: "cell", class: "pictures" }, make("ul", { class: "thumbs" }, ...items)));
    }
    return make("tr", { role: "row" }, ...cells);
  }

  function head() {
    const cells = columns.map((column, place) => {
      const button = make("button", { type: "button" }, make("bdi", {}, column.title));
      button.addEventListener("click", () => {
        up = sorted === place ? !up : place < 2;
        sorted = place;
        choose();
        table.querySelectorAll("thead button")[place].focus();
      });
      const cell = make("th", { role: "columnheader", scope: "col", class: column.kind }, button);
      if (place === sorted) cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      return cell;
    });
    if (pictures.checked) cells.push(make("th", { role: "columnheader", scope: "col", class: "pictures" }, "samples"));
    return make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...cells));
  }

  function turn(title, to, last) {
    const button = make("button", { type: "button" }, title);
    button.disabled = to < 0 || to > last;
    button.addEventListener("click", () => {
      page = to;
      show();
      document.getElementById("classes").scrollIntoView();
      const buttons = [...pages.querySelectorAll("button:enabled")];
      (buttons.find((one) => one.textContent === title) || buttons[0]).focus({ preventScroll: true });
    });
    return button;
  }

  function show() {
    const last = Math.max(0, Math.ceil(found.length / PAGE) - 1);
    const start = page * PAGE;
    const some = found.slice(start, start + PAGE);
    const body = make("tbody", { role: "rowgroup" }, ...some.map(row));
    table.replaceChildren(make("table", { role: "table" }, head(), body));
    const [first, end, all] = [start + 1, start + some.length, found.length].map((n) => n.toLocaleString("en"));
    const told = make("span", { role: "status" }, found.length ? `${first} to ${end} of ${all}` : "no such class");
    pages.replaceChildren(turn("Previous", page - 1, last), told, turn("Next", page + 1, last));
  }

  pictures.checked = true;
  browser.hidden = false;
  search.addEventListener("input", choose);
  pictures.addEventListener("change", show);
  choose();
})();
