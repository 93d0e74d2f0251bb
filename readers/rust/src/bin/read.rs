//! Reads values of sets, for tests and as an example: input and output are as in ../c/read.c.
//!
//!     printf 'imagenet\tval\tpixels\t0\n' | cargo run --bin read

use std::io::BufRead;

use shardio::{json, Error, Result, Split};

fn answer(line: &str) -> Result<String> {
    let words: Vec<_> = line.split('\t').collect();
    let [folder, split, part, sample] = words[..] else {
        return Err(Error("expected FOLDER, SPLIT, PART and SAMPLE".into()));
    };
    let sample = sample.parse().map_err(|_| Error(format!("expected a number, found {sample}")))?;
    let split = Split::open(folder, split)?;
    let value = split.read(part, sample)?;
    let label = split.label(sample)?.map_or("-".into(), |label| label.to_string());
    let key: String = split.key(sample)?.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{label} {key} {}", json::sha256(&value)))
}

fn main() {
    for line in std::io::stdin().lock().lines().map_while(std::result::Result::ok) {
        match answer(&line) {
            Ok(found) => println!("ok {found}"),
            Err(error) => println!("refused {error}"),
        }
    }
}
