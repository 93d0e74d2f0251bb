// Reads shard sets of format version 1 (docs/format.md) with Node alone.
//
//     import { openSplit } from "./shardio.mjs";
//     const train = openSplit("imagenet", "train");
//     const pixels = train.read("pixels", 0), label = train.label(0);
//
// openSplit checks the manifest and its digest, the type, size and header of every file of the split, and the sha256 of
// its tables, which it keeps in memory. `read` opens a file, checks it again and reads one row, whose crc32 must be
// right. Any error in a set is a FormatError.

import { createHash } from "node:crypto";
import { closeSync, constants, fstatSync, openSync, readSync } from "node:fs";
import { join } from "node:path";

import { FormatError, canonical, need, parse } from "./json.mjs";

export { FormatError };

const HEADER_NBYTES = 4096;
const MAX_COUNT = 2 ** 53;
const MAX_MANIFEST_NBYTES = 64 << 20;
const DTYPES = "|b1 |u1 |i1 <u2 <i2 <u4 <i4 <u8 <i8 <f2 <f4 <f8".split(" ");
const RESERVED = "crc32 image images index indices key label order pixels source_height source_width".split(" ");
const FIELDS = "label key source_width source_height crc32".split(" ");

// --- the manifest ----------------------------------------------------------------------------------------------------
// A rule is a function that takes a value and its place, and returns the value. Objects with known keys become plain
// objects.

const rule = (test, expected) => (value, where) => (need(test(value), where, expected, value), value);
const isCount = (value, minimum, maximum) => Number.isInteger(value) && value >= minimum && value <= maximum;
const fits = (pattern) => (value) => typeof value === "string" && pattern.test(value);

const count = rule((value) => isCount(value, 0, MAX_COUNT), "an integer from 0 to 2**53");
const positive = rule((value) => isCount(value, 1, MAX_COUNT), "an integer from 1 to 2**53");
const side = rule((value) => isCount(value, 1, 65536), "an integer from 1 to 65536");
const text = rule((value) => typeof value === "string", "a string");
const safeName = rule(fits(/^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$/), "a safe name");
const identifier = rule(fits(/^[A-Za-z_][A-Za-z0-9_]{0,63}$/), "a name of letters, digits and _");
const hash = rule(fits(/^[0-9a-f]{64}$/), "64 hexadecimal digits");
const map = rule((value) => value instanceof Map, "an object");
const just = (constant) => rule((value) => value === constant, String(constant));
const oneOf = (words) => rule((value) => words.includes(value), words.join(", "));

function list(each, minimum = 0, maximum = Infinity) {
  return (value, where) => {
    const isList = Array.isArray(value) && value.length >= minimum && value.length <= maximum;
    need(isList, where, `a list of ${minimum} or more`);
    return value.map((element, i) => each(element, `${where}[${i}]`));
  };
}

function distinct(each, minimum = 0) {
  return (value, where) => {
    const names = list(each, minimum)(value, where);
    need(new Set(names).size === names.length, where, "distinct names");
    return names;
  };
}

function mapOf(key, each, maximum = Infinity) {
  return (value, where) => {
    need(map(value, where).size && value.size <= maximum, where, `1 to ${maximum} keys`);
    return new Map([...value].map(([name, one]) => [key(name, where), each(one, `${where}.${name}`)]));
  };
}

function object(needed, optional = {}) {
  return (value, where) => {
    const result = {};
    for (const key of Object.keys(needed)) need(map(value, where).has(key), where, `a key ${key}`);
    for (const [key, one] of value) {
      const known = Object.hasOwn(needed, key) ? needed[key] : Object.hasOwn(optional, key) ? optional[key] : null;
      need(known, where, "no other keys", key);
      result[key] = known(one, `${where}.${key}`);
    }
    return result;
  };
}

const FILE = { file: safeName, nbytes: count, sha256: hash };
const shard = object({ ...FILE, num_samples: positive });
const column = (value, where) => {
  const [name, type] = list(text, 2, 2)(value, where);
  need(!FIELDS.includes(name), where, "another name", name);
  return [identifier(name, where), oneOf(["<i8", "<f8"])(type, where)];
};
const index = object({ ...FILE, key_nbytes: count }, { columns: list(column, 1, 50), label: just(false) });
const array = object(
  {
    kind: oneOf(["array", "mask", "boxes", "image"]),
    dtype: oneOf(DTYPES),
    shape: list(side, 0, 8),
    crc32: object(FILE),
    shards: list(shard, 1),
  },
  { order: count, names: distinct(text, 1) },
);
const arrayName = (name, where) => {
  need(!RESERVED.includes(name), where, "another name", name);
  return identifier(name, where);
};
const split = object(
  { num_samples: positive, index, shards: list(shard) },
  { orders: list(object(FILE), 1), order: count, arrays: mapOf(arrayName, array, 50), squashed: just(true) },
);
const manifest = object(
  {
    format: just("shardio"),
    format_version: just(1),
    sample_shape: (value, where) => (value === null ? null : list(side, 3, 3)(value, where)),
    classes: distinct(text),
    splits: mapOf(safeName, split),
    rejects: object({ ...FILE, num_rejects: count }),
    provenance: map,
    digest: hash,
  },
  { class_names: list(text, 1) },
);

function parseManifest(data, where) {
  need(data.every((byte) => byte < 128), where, "ASCII");
  const document = parse(data.toString("latin1"), where);
  const result = manifest(document, where);
  const { classes, class_names: names, sample_shape: shape, rejects, splits } = result;
  need(!names || names.length === classes.length, where, `${classes.length} class names`);
  const files = [rejects];
  for (const [name, entry] of splits) files.push(...checkSplit(entry, shape, `${where}: splits.${name}`));
  const lower = new Set(["manifest.json", ...files.map((file) => file.file.toLowerCase())]);
  need(lower.size === files.length + 1, where, "distinct names of files");
  const content = new Map([...document].filter(([key]) => key !== "digest" && key !== "provenance"));
  need(sha256(canonical(content)) === result.digest, where, `the digest ${sha256(canonical(content))}`, result.digest);
  return result;
}

function checkSize(file, rows, rowNbytes, where) {
  const nbytes = file.nbytes - HEADER_NBYTES;
  need(rows * rowNbytes === nbytes, `${where}, ${file.file}`, `another nbytes for ${rows} rows`, file.nbytes);
}

// Checks that the values of a split fit together. Adds `parts`, by name, and returns the entries of all files.
function checkSplit(entry, sampleShape, where) {
  const { num_samples: numSamples, index, shards, orders = [], order, arrays = new Map(), squashed } = entry;
  const { key_nbytes: keyNbytes, columns = [], label } = index;
  const columnNames = columns.map(([name]) => name);
  need(keyNbytes % 8 === 4 && keyNbytes < 65536, where, "a key_nbytes that is 4 modulo 8", keyNbytes);
  need(new Set(columnNames).size === columns.length, where, "distinct columns");
  index.hasLabel = label === undefined;
  index.rowNbytes = (index.hasLabel ? 8 : 0) + keyNbytes + 12 + 8 * columns.length;
  checkSize(index, numSamples, index.rowNbytes, where);
  for (const file of orders) checkSize(file, numSamples, 8, where);
  entry.parts = new Map();
  if (sampleShape === null) {
    need(!shards.length && order === undefined && !squashed, where, "no shards, order or squashed without pixels");
    need(arrays.size > (arrays.has("labels") ? 1 : 0), where, "an array besides labels");
  } else {
    need(shards.length, where, "shards");
    entry.parts.set("pixels", { kind: "image", dtype: "|u1", shape: sampleShape, shards, order });
  }
  for (const [name, array] of arrays) {
    need(fitsKind(array, sampleShape), `${where}.${name}`, "a type and shape that fit kind and samples");
    need(array.names === undefined || array.kind === "boxes", `${where}.${name}`, "names for boxes only");
    need(!columnNames.includes(name), `${where}.${name}`, "a name of no column");
    const { kind, dtype, shape } = array;
    const areLabels = kind === "array" && dtype === "<f4" && shape.length < 2 && !index.hasLabel;
    need(name !== "labels" || areLabels, `${where}.${name}`, "labels of float32, in no other place");
    entry.parts.set(name, array);
  }
  const used = new Set();
  for (const [name, part] of entry.parts) {
    part.rowNbytes = part.shape.reduce((product, n) => product * n, Number(part.dtype[2]));
    part.numRows = part.shards.reduce((sum, { num_samples: n }) => sum + n, 0);
    for (const file of part.shards) checkSize(file, file.num_samples, part.rowNbytes, `${where}.${name}`);
    if (part.order === undefined) need(part.numRows === numSamples, `${where}.${name}`, `${numSamples} rows`);
    else need(used.add(part.order) && part.order < orders.length, `${where}.${name}`, "an order of the split");
    if (part.crc32) checkSize(part.crc32, part.numRows, 4, `${where}.${name}`);
  }
  need(used.size === orders.length, where, "orders that are used");
  return [index, ...orders, ...shards, ...[...arrays.values()].flatMap((array) => [array.crc32, ...array.shards])];
}

function fitsKind({ kind, dtype, shape }, sampleShape) {
  if (kind === "array") return true;
  if (sampleShape === null) return false;
  const [height, width, channels] = sampleShape;
  if (kind === "boxes") return dtype === "<f4" && shape.length === 2 && shape[1] === 5;
  if (kind === "image") return dtype === "|u1" && shape.length === 3 && shape[2] === channels;
  return (shape.length === 2 || shape.length === 3) && shape[0] === height && shape[1] === width;
}

// --- files -----------------------------------------------------------------------------------------------------------

const sha256 = (data) => createHash("sha256").update(data).digest("hex");

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? (n >>> 1) ^ 0xedb88320 : n >>> 1;
  return n;
});

function crc32(data) {
  let crc = -1;
  for (const byte of data) crc = (crc >>> 8) ^ CRC_TABLE[(crc ^ byte) & 255];
  return ~crc >>> 0;
}

function npyHeader(descr, shape) {
  const sides = shape.length === 1 ? `${shape[0]},` : shape.join(", ");
  const start = `\x93NUMPY\x01\x00\xf6\x0f{'descr': ${descr}, 'fortran_order': False, 'shape': (${sides}), }`;
  return Buffer.from(`${start.padEnd(HEADER_NBYTES - 1)}\n`, "latin1");
}

function readAt(file, nbytes, offset, where) {
  const data = Buffer.alloc(nbytes);
  for (let done = 0; done < nbytes; ) {
    const length = Math.min(nbytes - done, 1 << 30);
    const found = readSync(file, data, done, length, offset + done);
    need(found > 0, where, `${nbytes} bytes at ${offset}`);
    done += found;
  }
  return data;
}

// Calls `use` with the descriptor of a regular file and its size.
function withFile(folder, name, use) {
  const where = join(folder, name);
  let file;
  try {
    file = openSync(where, constants.O_RDONLY | constants.O_NOFOLLOW | constants.O_NONBLOCK);
  } catch (error) {
    throw new FormatError(`${where}: expected a file: ${error.code}`);
  }
  try {
    const status = fstatSync(file);
    need(status.isFile(), where, "a regular file");
    return use(file, status.size, where);
  } finally {
    closeSync(file);
  }
}

// Calls `use` after the size and the header of the file were compared with the manifest.
function withChecked(folder, entry, header, use) {
  return withFile(folder, entry.file, (file, nbytes, where) => {
    need(nbytes === entry.nbytes, where, `${entry.nbytes} bytes`, nbytes);
    need(readAt(file, HEADER_NBYTES, 0, where).equals(header), where, "the header of its type and shape");
    return use(file, where);
  });
}

// Returns the rows of a table, whose sha256 must be right.
function readTable(folder, entry, descr, numRows) {
  return withChecked(folder, entry, npyHeader(descr, [numRows]), (file, where) => {
    const data = readAt(file, entry.nbytes, 0, where);
    need(sha256(data) === entry.sha256, where, `the sha256 ${entry.sha256}`, sha256(data));
    return data.subarray(HEADER_NBYTES);
  });
}

const shardHeader = (part, entry) => npyHeader(`'${part.dtype}'`, [entry.num_samples, ...part.shape]);

// One split of a set. `parts` has "pixels", if the set has any, and the arrays by name: `dtype` and `shape` of a value.
class Split {
  constructor(folder, { digest, classes }, entry) {
    const { num_samples: numSamples, index, orders = [], parts } = entry;
    Object.assign(this, { folder, digest, classes, numSamples, index, parts });
    const types = { label: "<i8", key: `|S${index.key_nbytes}` };
    const fields = FIELDS.slice(index.hasLabel ? 0 : 1).map((name) => [name, types[name] ?? "<u4"]);
    const pairs = [...fields, ...(index.columns ?? [])].map(([name, type]) => `('${name}', '${type}')`);
    this.rows = readTable(folder, index, `[${pairs.join(", ")}]`, numSamples);
    this.orders = orders.map((order) => readTable(folder, order, "'<i8'", numSamples));
    this.sums = new Map();
    for (const [name, part] of parts) {
      if (part.crc32) this.sums.set(name, readTable(folder, part.crc32, "'<u4'", part.numRows));
      for (const file of part.shards) withChecked(folder, file, shardHeader(part, file), () => {});
    }
  }

  // The label as a BigInt; null if the index has none.
  label(sample) {
    if (!this.index.hasLabel) return null;
    const label = this.rows.readBigInt64LE(this.#row(sample));
    const isClass = !this.classes.length || (label >= 0n && label < this.classes.length);
    need(isClass, `${this.index.file}: sample ${sample}`, `a label below ${this.classes.length}`, label);
    return label;
  }

  key(sample) {
    const start = this.#row(sample) + (this.index.hasLabel ? 8 : 0);
    let end = start + this.index.key_nbytes;
    while (end > start && !this.rows[end - 1]) end--;
    return this.rows.subarray(start, end);
  }

  // The pixels of a sample ("pixels"), or its value of an array, as bytes.
  read(name, sample) {
    const part = this.parts.get(name);
    if (!part) throw new RangeError(`${name}: expected ${[...this.parts.keys()].join(", ")}`);
    const crcAt = this.#row(sample) + this.index.rowNbytes - 8 * (this.index.columns?.length ?? 0) - 4;
    const row = part.order === undefined ? sample : Number(this.orders[part.order].readBigInt64LE(8 * sample));
    need(row >= 0 && row < part.numRows, `${name} of sample ${sample}`, `a row below ${part.numRows}`, row);
    const expected = this.sums.has(name) ? this.sums.get(name).readUInt32LE(4 * row) : this.rows.readUInt32LE(crcAt);
    let first = row;
    const file = part.shards.find(({ num_samples: n }) => first < n || ((first -= n), false));
    const offset = HEADER_NBYTES + first * part.rowNbytes;
    return withChecked(this.folder, file, shardHeader(part, file), (opened, where) => {
      const value = readAt(opened, part.rowNbytes, offset, where);
      need(crc32(value) === expected, `${where}: sample ${sample}`, `the crc32 ${expected}`, crc32(value));
      return value;
    });
  }

  #row(sample) {
    if (isCount(sample, 0, this.numSamples - 1)) return sample * this.index.rowNbytes;
    throw new RangeError(`sample ${sample}: expected 0 to ${this.numSamples - 1}`);
  }
}

export function openSplit(folder, name) {
  const manifest = withFile(folder, "manifest.json", (file, nbytes, where) => {
    need(nbytes <= MAX_MANIFEST_NBYTES, where, `at most ${MAX_MANIFEST_NBYTES} bytes`, nbytes);
    return parseManifest(readAt(file, nbytes, 0, where), where);
  });
  if (!manifest.splits.has(name)) throw new RangeError(`${folder}: expected ${[...manifest.splits.keys()].join(", ")}`);
  return new Split(folder, manifest, manifest.splits.get(name));
}
