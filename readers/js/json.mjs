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
const TOKEN = /"(?:[^"\\]|\\.)*"|[^\s,:"[\]{}]+|[[\]{}]/g;

export function parse(text, where) {
  try {
    JSON.parse(text);
  } catch (error) {
    need(false, where, "JSON", error.message);
  }
  const tokens = text.matchAll(TOKEN); // commas and colons are where they must be
  const next = () => tokens.next().value[0];
  const value = (token, depth) => {
    need(depth <= 100 || !"[{".includes(token), where, "at most 100 levels");
    if (token === "{") {
      const result = new Map();
      for (let word = next(); word !== "}"; word = next()) {
        const key = value(word, depth);
        need(!result.has(key), where, "distinct keys", key);
        result.set(key, value(next(), depth + 1));
      }
      return result;
    }
    if (token === "[") {
      const result = [];
      for (let word = next(); word !== "]"; word = next()) result.push(value(word, depth + 1));
      return result;
    }
    const single = JSON.parse(token);
    need(!LONE.test(single), where, "no lone surrogates but U+DC80 to U+DCFF", single);
    return typeof single === "number" ? number(token, where) : single;
  };
  return value(next(), 0);
}

function number(token, where) {
  const isInteger = /^-?[0-9]+$/.test(token);
  const isSound = isInteger ? token.length <= 4300 : Number.isFinite(Number(token));
  need(isSound, where, "a number in the range of float64", token);
  if (!isInteger) return new Float();
  const integer = BigInt(token);
  return integer > 2 ** 53 ? Infinity : Number(integer);
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
