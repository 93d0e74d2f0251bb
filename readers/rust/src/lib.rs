//! Reads shard sets of format version 1 (docs/format.md) on Unix, with the standard library alone.
//!
//! `Split::open` checks the manifest and its digest, the type, size and header of every file of one split, and the
//! sha256 of its tables, which it keeps in memory. `Split::read` opens a file, checks it again and reads one row, whose
//! crc32 must be right. Any number of threads may use a `Split`.
#![forbid(unsafe_code)]

pub mod json;
mod manifest;

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

pub use manifest::{Entry, Part};

/// What is wrong with a set, or with an argument.
#[derive(Debug)]
pub struct Error(pub String);
pub type Result<T> = std::result::Result<T, Error>;

impl std::fmt::Display for Error {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

#[macro_export]
macro_rules! need {
    ($condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err(Error(format!($($message)*)));
        }
    };
}

const HEADER_NBYTES: u64 = 4096;
const MAX_MANIFEST_NBYTES: u64 = 64 << 20;

/// One split of a set.
pub struct Split {
    folder: PathBuf,
    entry: manifest::Split,
    num_classes: usize,
    index: Vec<u8>,
    orders: Vec<Vec<u8>>,
    crc32s: Vec<Vec<u8>>,
    /// The digest of the set.
    pub digest: String,
}

impl Split {
    pub fn open(folder: impl AsRef<Path>, name: &str) -> Result<Split> {
        let folder = folder.as_ref().to_path_buf();
        let (file, nbytes) = open_regular(&folder, "manifest.json")?;
        need!(nbytes <= MAX_MANIFEST_NBYTES, "manifest.json: expected at most 64 MiB, found {nbytes} bytes");
        let mut manifest = manifest::parse(&read_at(&file, "manifest.json", nbytes, 0)?)?;
        let entry = manifest.splits.remove(name).ok_or_else(|| Error(format!("expected a split {name}")))?;
        let header = npy_header(&entry.index_descr(), &[entry.num_samples]);
        let index = read_table(&folder, &entry.index, &header)?;
        let header = npy_header("'<i8'", &[entry.num_samples]);
        let orders = entry.orders.iter().map(|order| read_table(&folder, order, &header)).collect::<Result<_>>()?;
        let mut crc32s = Vec::new();
        for part in &entry.parts {
            let header = npy_header("'<u4'", &[part.num_rows]);
            crc32s.push(part.crc32.as_ref().map_or(Ok(Vec::new()), |table| read_table(&folder, table, &header))?);
            for shard in &part.shards {
                open_checked(&folder, shard, &shard_header(part, shard))?;
            }
        }
        let (digest, num_classes) = (manifest.digest, manifest.classes.len());
        Ok(Split { folder, entry, num_classes, index, orders, crc32s, digest })
    }

    pub fn num_samples(&self) -> u64 {
        self.entry.num_samples
    }

    /// "pixels", if the set has any, and the arrays.
    pub fn parts(&self) -> &[Part] {
        &self.entry.parts
    }

    /// Returns the label of a sample; `None` if the index has no labels.
    pub fn label(&self, sample: u64) -> Result<Option<i64>> {
        let row = self.row(sample)?;
        if !self.entry.has_label {
            return Ok(None);
        }
        let label = little(&row[..8]) as i64;
        let is_class = self.num_classes == 0 || (label >= 0 && (label as u64) < self.num_classes as u64);
        need!(is_class, "{}: sample {sample}: expected the label of a class, found {label}", self.entry.index.name);
        Ok(Some(label))
    }

    pub fn key(&self, sample: u64) -> Result<&[u8]> {
        let start = if self.entry.has_label { 8 } else { 0 };
        let key = &self.row(sample)?[start..start + self.entry.key_nbytes as usize];
        Ok(&key[..key.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1)])
    }

    /// Returns the pixels of a sample ("pixels"), or its value of an array, as bytes.
    pub fn read(&self, name: &str, sample: u64) -> Result<Vec<u8>> {
        let number = self.entry.parts.iter().position(|part| part.name == name);
        let number = number.ok_or_else(|| Error(format!("expected pixels or an array, found {name}")))?;
        let part = &self.entry.parts[number];
        let fields = self.row(sample)?;
        let row = part.order.map_or(sample, |order| little(&self.orders[order][8 * sample as usize..][..8]));
        need!(row < part.num_rows, "{name} of sample {sample}: expected a row below {}, found {row}", part.num_rows);
        let crc32 = match part.crc32 {
            Some(_) => &self.crc32s[number][4 * row as usize..],
            None => &fields[self.entry.crc32_offset()..],
        };
        let mut first = row;
        for shard in &part.shards {
            if first >= shard.num_rows {
                first -= shard.num_rows;
                continue;
            }
            let file = open_checked(&self.folder, shard, &shard_header(part, shard))?;
            let value = read_at(&file, &shard.name, part.row_nbytes, HEADER_NBYTES + first * part.row_nbytes)?;
            let is_sound = u64::from(json::crc32(&value)) == little(&crc32[..4]);
            need!(is_sound, "{}: sample {sample}: expected another crc32", shard.name);
            return Ok(value);
        }
        Err(Error(format!("{name}: expected {} rows in the shards", part.num_rows)))
    }

    fn row(&self, sample: u64) -> Result<&[u8]> {
        need!(sample < self.num_samples(), "expected a sample below {}, found {sample}", self.num_samples());
        let nbytes = self.entry.row_nbytes as usize;
        Ok(&self.index[sample as usize * nbytes..][..nbytes])
    }
}

fn little(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

fn npy_header(descr: &str, shape: &[u64]) -> Vec<u8> {
    let sides: Vec<_> = shape.iter().map(u64::to_string).collect();
    let comma = if shape.len() == 1 { "," } else { "" };
    let mut header = b"\x93NUMPY\x01\x00\xf6\x0f".to_vec();
    let text = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': ({}{comma}), }}", sides.join(", "));
    header.extend(text.bytes());
    header.resize(HEADER_NBYTES as usize - 1, b' ');
    header.push(b'\n');
    header
}

fn shard_header(part: &Part, shard: &Entry) -> Vec<u8> {
    let shape: Vec<_> = std::iter::once(shard.num_rows).chain(part.shape.iter().copied()).collect();
    npy_header(&format!("'{}'", part.dtype), &shape)
}

/// Opens a regular file, and returns it with its size. (A FIFO that comes between the two looks would block.)
fn open_regular(folder: &Path, name: &str) -> Result<(File, u64)> {
    let path = folder.join(name);
    let failed = |error: std::io::Error| Error(format!("{name}: expected a file: {error}"));
    let before = fs::symlink_metadata(&path).map_err(failed)?;
    need!(before.is_file(), "{name}: expected a regular file");
    let file = File::open(&path).map_err(failed)?;
    let status = file.metadata().map_err(failed)?;
    let is_same = status.dev() == before.dev() && status.ino() == before.ino();
    need!(is_same, "{name}: expected a file that is not replaced while it is opened");
    Ok((file, status.len()))
}

fn read_at(file: &File, name: &str, nbytes: u64, offset: u64) -> Result<Vec<u8>> {
    let mut data = Vec::new();
    let room = usize::try_from(nbytes).ok().and_then(|nbytes| data.try_reserve_exact(nbytes).ok().map(|()| nbytes));
    data.resize(room.ok_or_else(|| Error(format!("{name}: expected memory for {nbytes} bytes")))?, 0);
    file.read_exact_at(&mut data, offset).map_err(|error| Error(format!("{name}: at {offset}: {error}")))?;
    Ok(data)
}

/// Opens a file of the set, and compares its size and header with the manifest.
fn open_checked(folder: &Path, entry: &Entry, header: &[u8]) -> Result<File> {
    let (file, nbytes) = open_regular(folder, &entry.name)?;
    need!(nbytes == entry.nbytes, "{}: expected {} bytes, found {nbytes}", entry.name, entry.nbytes);
    let is_sound = read_at(&file, &entry.name, HEADER_NBYTES, 0)? == header;
    need!(is_sound, "{}: expected the header of its type and shape", entry.name);
    Ok(file)
}

/// Returns the rows of a table, whose sha256 must be right.
fn read_table(folder: &Path, entry: &Entry, header: &[u8]) -> Result<Vec<u8>> {
    let file = open_checked(folder, entry, header)?;
    let mut data = read_at(&file, &entry.name, entry.nbytes, 0)?;
    let sha256 = json::sha256(&data);
    need!(sha256 == entry.sha256, "{}: sha256: expected {}, found {sha256}", entry.name, entry.sha256);
    Ok(data.split_off(HEADER_NBYTES as usize))
}
