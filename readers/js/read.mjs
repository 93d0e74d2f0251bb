// Reads values of sets, for tests and as an example: input and output are as in ../c/read.c.
//
//     printf 'imagenet\tval\tpixels\t0\n' | node read.mjs

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";

import { FormatError, openSplit } from "./shardio.mjs";

for (const line of readFileSync(0, "utf8").split("\n").filter(Boolean)) {
  const [folder, split, part, sample] = line.split("\t");
  try {
    const opened = openSplit(folder, split);
    const value = opened.read(part, Number(sample));
    const label = opened.label(Number(sample)) ?? "-";
    const digest = createHash("sha256").update(value).digest("hex");
    console.log(`ok ${label} ${opened.key(Number(sample)).toString("hex")} ${digest}`);
  } catch (error) {
    if (!(error instanceof FormatError || error instanceof RangeError)) throw error;
    console.log(`refused ${error.message}`);
  }
}
