// JSON as a manifest may have it. JSON.parse accepts repeated keys and takes 1.0 for 1. Here objects are Maps, integers
// above 2**53 are Infinity, which no count may be, and other numbers are of the class Float.

export class FormatError extends Error {}

export function need(condition, where, expected, found) {
  if (condition) return;
  const shown = found === undefined ? "" : `, found ${quote(String(found).slice(0, 80))}`;
  throw new FormatError(`${where}: expected ${expected}${shown}`);
}

class Float {}

const LONE = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udc7f\udd00-\udfff]/;
const NUMBER = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y;

export function parse(text, where) {
  return new Parser(text, where).document();
}

class Parser {
  constructor(text, where) {
    this.text = text;
    this.where = where;
    this.at = 0;
  }

  document() {
    const value = this.value(0);
    this.space();
    need(this.at === this.text.length, this.where, "one JSON object");
    return value;
  }

  space() {
    while (" \t\n\r".includes(this.text[this.at] ?? "x")) this.at++;
  }

  take(token) {
    if (!this.text.startsWith(token, this.at)) return false;
    this.at += token.length;
    return true;
  }

  value(depth) {
    this.space();
    if (this.text[this.at] === '"') return this.string();
    if (this.take("true")) return true;
    if (this.take("false")) return false;
    if (this.take("null")) return null;
    const isObject = this.take("{");
    if (!isObject && !this.take("[")) return this.number();
    need(depth <= 100, this.where, "at most 100 levels");
    return isObject ? this.object(depth) : this.list(depth);
  }

  object(depth) {
    const result = new Map();
    for (this.space(); !this.take("}"); this.space()) {
      need(!result.size || this.take(","), this.where, "',' between values");
      this.space();
      need(this.text[this.at] === '"', this.where, "a key");
      const key = this.string();
      need(!result.has(key), this.where, "distinct keys", key);
      this.space();
      need(this.take(":"), this.where, "':' after a key", key);
      result.set(key, this.value(depth + 1));
    }
    return result;
  }

  list(depth) {
    const result = [];
    for (this.space(); !this.take("]"); this.space()) {
      need(!result.length || this.take(","), this.where, "',' between values");
      result.push(this.value(depth + 1));
    }
    return result;
  }

  string() {
    let end = this.at + 1;
    while (end < this.text.length && this.text[end] !== '"') end += this.text[end] === "\\" ? 2 : 1;
    let result;
    try {
      result = JSON.parse(this.text.slice(this.at, end + 1));
    } catch {
      need(false, this.where, "a string");
    }
    need(!LONE.test(result), this.where, "no lone surrogates but U+DC80 to U+DCFF", result);
    this.at = end + 1;
    return result;
  }

  number() {
    NUMBER.lastIndex = this.at;
    const match = NUMBER.exec(this.text);
    need(match, this.where, "a JSON value");
    this.at = NUMBER.lastIndex;
    const isInteger = match[1] === undefined && match[2] === undefined;
    const isSound = isInteger ? match[0].length <= 4300 : Number.isFinite(Number(match[0]));
    need(isSound, this.where, "a number in the range of float64", match[0]);
    if (!isInteger) return new Float();
    const integer = BigInt(match[0]);
    return integer > 2 ** 53 ? Infinity : Number(integer);
  }
}

function quote(text) {
  const shorts = { "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\" };
  const escape = (unit) => shorts[unit] ?? `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return `"${text.replace(/[^ -~]|["\\]/g, escape)}"`;
}

// Returns canonical JSON: the text that is hashed.
export function canonical(value) {
  if (typeof value === "string") return quote(value);
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (!(value instanceof Map)) return String(value);
  const keys = [...value.keys()].sort();
  return `{${keys.map((key) => `${quote(key)}:${canonical(value.get(key))}`).join(",")}}`;
}
