//! The manifest as values that fit together.

use std::collections::{BTreeMap, HashSet};

use crate::json::{canonical, parse as parse_json, sha256, Object, Value};
use crate::{need, Error, Result, HEADER_NBYTES};

const MAX_COUNT: u64 = 1 << 53;
const DTYPES: [&str; 12] = ["|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8"];
const FIELDS: [&str; 5] = ["label", "key", "source_width", "source_height", "crc32"];
const RESERVED: [&str; 11] = [
    "crc32",
    "image",
    "images",
    "index",
    "indices",
    "key",
    "label",
    "order",
    "pixels",
    "source_height",
    "source_width",
];

/// A file. `num_rows` is set for shards only.
pub struct Entry {
    pub name: String,
    pub nbytes: u64,
    pub sha256: String,
    pub num_rows: u64,
}

/// Rows of one type: "pixels", or an array.
pub struct Part {
    pub name: String,
    pub kind: String,
    pub dtype: String,
    pub shape: Vec<u64>,
    pub row_nbytes: u64,
    pub num_rows: u64,
    pub shards: Vec<Entry>,
    /// The crc32 of each row; of pixels, it is in the index.
    pub crc32: Option<Entry>,
    pub order: Option<usize>,
}

pub struct Split {
    pub num_samples: u64,
    pub index: Entry,
    pub key_nbytes: u64,
    pub has_label: bool,
    pub columns: Vec<(String, String)>,
    pub row_nbytes: u64,
    pub orders: Vec<Entry>,
    pub parts: Vec<Part>,
}

pub struct Manifest {
    pub classes: Vec<String>,
    pub splits: BTreeMap<String, Split>,
    pub digest: String,
}

impl Split {
    pub fn index_descr(&self) -> String {
        let mut fields: Vec<(&str, String)> = vec![("label", "<i8".into())];
        fields.truncate(usize::from(self.has_label));
        fields.push(("key", format!("|S{}", self.key_nbytes)));
        fields.extend(FIELDS[2..].iter().map(|&name| (name, "<u4".into())));
        fields.extend(self.columns.iter().map(|(name, dtype)| (name.as_str(), dtype.clone())));
        let pairs: Vec<_> = fields.iter().map(|(name, dtype)| format!("('{name}', '{dtype}')")).collect();
        format!("[{}]", pairs.join(", "))
    }

    pub fn crc32_offset(&self) -> usize {
        self.row_nbytes as usize - 8 * self.columns.len() - 4
    }
}

// --- single values ---------------------------------------------------------------------------------------------------

fn object<'a>(value: &'a Value, place: &str, needed: &[&str], optional: &[&str]) -> Result<&'a Object> {
    let Value::Object(object) = value else {
        return Err(Error(format!("{place}: expected an object")));
    };
    for key in needed {
        need!(object.contains_key(*key), "{place}: expected a key {key}");
    }
    for key in object.keys().map(String::as_str) {
        need!(needed.contains(&key) || optional.contains(&key), "{place}: expected no key {key:.80}");
    }
    Ok(object)
}

fn map<'a>(value: &'a Value, place: &str) -> Result<&'a Object> {
    match value {
        Value::Object(object) if !object.is_empty() => Ok(object),
        _ => Err(Error(format!("{place}: expected an object that is not empty"))),
    }
}

fn list<'a>(value: &'a Value, place: &str, minimum: usize, maximum: usize) -> Result<&'a [Value]> {
    match value {
        Value::List(list) if (minimum..=maximum).contains(&list.len()) => Ok(list),
        _ => Err(Error(format!("{place}: expected a list of at least {minimum}"))),
    }
}

fn count(value: &Value, place: &str, minimum: u64, maximum: u64) -> Result<u64> {
    match value {
        Value::Count(count) if (minimum..=maximum).contains(count) => Ok(*count),
        _ => Err(Error(format!("{place}: expected an integer from {minimum} to {maximum}"))),
    }
}

fn text(value: &Value, place: &str) -> Result<String> {
    match value {
        Value::Text(text) => Ok(text.clone()),
        _ => Err(Error(format!("{place}: expected a string"))),
    }
}

fn texts(value: &Value, place: &str, minimum: usize) -> Result<Vec<String>> {
    list(value, place, minimum, usize::MAX)?.iter().map(|one| text(one, place)).collect()
}

fn check_distinct<'a>(names: impl IntoIterator<Item = &'a String>, place: &str) -> Result<()> {
    let mut seen = HashSet::new();
    for name in names {
        need!(seen.insert(name), "{place}: expected distinct names, found {name:.80} twice");
    }
    Ok(())
}

fn one_of(value: &Value, place: &str, words: &[&str]) -> Result<String> {
    let text = text(value, place)?;
    need!(words.contains(&text.as_str()), "{place}: expected one of {words:?}, found {text:.80}");
    Ok(text)
}

/// Whether the object has this key, whose only value is `value`.
fn flag(object: &Object, key: &str, value: bool) -> Result<bool> {
    match object.get(key) {
        None => Ok(false),
        Some(Value::Bool(found)) if *found == value => Ok(true),
        Some(_) => Err(Error(format!("{key}: expected {value}, or no such key"))),
    }
}

fn check_name(name: &str, place: &str) -> Result<()> {
    let is_sound = name.bytes().all(|c| c.is_ascii_alphanumeric() || b"._-".contains(&c)) && name.len() <= 200;
    let first = name.bytes().next().is_some_and(|c| c.is_ascii_alphanumeric());
    need!(is_sound && first, "{place}: expected a safe name, found {name:.80}");
    Ok(())
}

fn check_identifier(name: &str, place: &str, taken: &[&str]) -> Result<()> {
    let is_sound = name.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_') && name.len() <= 64;
    let first = name.bytes().next().is_some_and(|c| !c.is_ascii_digit());
    need!(is_sound && first && !taken.contains(&name), "{place}: expected another name, found {name:.80}");
    Ok(())
}

const FILE: [&str; 3] = ["file", "nbytes", "sha256"];

fn file(object: &Object, place: &str) -> Result<Entry> {
    let name = text(&object["file"], place)?;
    check_name(&name, place)?;
    let sha256 = text(&object["sha256"], place)?;
    let is_hash = sha256.len() == 64 && sha256.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c));
    need!(is_hash, "{place}: expected 64 hexadecimal digits");
    Ok(Entry { name, nbytes: count(&object["nbytes"], place, 0, MAX_COUNT)?, sha256, num_rows: 0 })
}

fn table(value: &Value, place: &str, num_rows: u64, row_nbytes: u64) -> Result<Entry> {
    let entry = file(object(value, place, &FILE, &[])?, place)?;
    check_nbytes(&entry, num_rows, row_nbytes)?;
    Ok(entry)
}

fn check_nbytes(entry: &Entry, num_rows: u64, row_nbytes: u64) -> Result<()> {
    let nbytes = num_rows.checked_mul(row_nbytes).and_then(|nbytes| nbytes.checked_add(HEADER_NBYTES));
    need!(nbytes == Some(entry.nbytes), "{}: expected another nbytes for {num_rows} rows", entry.name);
    Ok(())
}

fn shards(value: &Value, place: &str, minimum: usize, row_nbytes: u64) -> Result<Vec<Entry>> {
    let shard = |value: &Value| {
        let object = object(value, place, &["file", "nbytes", "sha256", "num_samples"], &[])?;
        let num_rows = count(&object["num_samples"], place, 1, MAX_COUNT)?;
        let entry = Entry { num_rows, ..file(object, place)? };
        check_nbytes(&entry, num_rows, row_nbytes)?;
        Ok(entry)
    };
    list(value, place, minimum, usize::MAX)?.iter().map(shard).collect()
}

fn sides(value: &Value, place: &str, minimum: usize, maximum: usize) -> Result<Vec<u64>> {
    list(value, place, minimum, maximum)?.iter().map(|side| count(side, place, 1, 65536)).collect()
}

// --- what fits together ----------------------------------------------------------------------------------------------

pub fn parse(data: &[u8]) -> Result<Manifest> {
    let place = "manifest.json";
    let root = parse_json(data)?;
    let needed = ["format", "format_version", "sample_shape", "classes", "splits", "rejects", "provenance", "digest"];
    let document = object(&root, place, &needed, &["class_names"])?;
    one_of(&document["format"], "format", &["shardio"])?;
    count(&document["format_version"], "format_version", 1, 1)?;
    let shape = match &document["sample_shape"] {
        Value::Null => None,
        shape => Some(sides(shape, "sample_shape", 3, 3)?),
    };
    let classes = texts(&document["classes"], "classes", 0)?;
    check_distinct(&classes, "classes")?;
    if let Some(names) = document.get("class_names") {
        need!(texts(names, "class_names", 1)?.len() == classes.len(), "class_names: expected one for each class");
    }
    need!(matches!(document["provenance"], Value::Object(_)), "provenance: expected an object");
    let rejects = object(&document["rejects"], "rejects", &["file", "nbytes", "sha256", "num_rejects"], &[])?;
    count(&rejects["num_rejects"], "num_rejects", 0, MAX_COUNT)?;
    let mut splits = BTreeMap::new();
    for (name, value) in map(&document["splits"], "splits")? {
        check_name(name, "splits")?;
        splits.insert(name.clone(), split(value, name, shape.as_deref())?);
    }
    let mut names = vec![place.to_string(), file(rejects, "rejects")?.name.to_ascii_lowercase()];
    names.extend(splits.values().flat_map(files).map(|entry| entry.name.to_ascii_lowercase()));
    check_distinct(&names, place)?;
    let digest = sha256(canonical(&root, &["digest", "provenance"]).as_bytes());
    need!(text(&document["digest"], "digest")? == digest, "{place}: expected the digest {digest}");
    Ok(Manifest { classes, splits, digest })
}

fn files(split: &Split) -> impl Iterator<Item = &Entry> {
    let parts = split.parts.iter().flat_map(|part| part.shards.iter().chain(&part.crc32));
    std::iter::once(&split.index).chain(&split.orders).chain(parts)
}

fn split(value: &Value, place: &str, sample_shape: Option<&[u64]>) -> Result<Split> {
    let needed = ["num_samples", "index", "shards"];
    let content = object(value, place, &needed, &["orders", "order", "arrays", "squashed"])?;
    let num_samples = count(&content["num_samples"], place, 1, MAX_COUNT)?;
    let index = object(&content["index"], place, &["file", "nbytes", "sha256", "key_nbytes"], &["columns", "label"])?;
    let key_nbytes = count(&index["key_nbytes"], place, 4, 65532)?;
    need!(key_nbytes % 8 == 4, "{place}: expected a key_nbytes that is 4 modulo 8");
    let has_label = !flag(index, "label", false)?;
    let columns = index.get("columns").map_or(Ok(Vec::new()), |value| columns(value, place))?;
    let row_nbytes = key_nbytes + 12 + 8 * (columns.len() as u64 + u64::from(has_label));
    let orders = content.get("orders").map_or(Ok(&[][..]), |value| list(value, place, 1, usize::MAX))?;
    let orders = orders.iter().map(|order| table(order, place, num_samples, 8)).collect::<Result<Vec<_>>>()?;
    let is_squashed = flag(content, "squashed", true)?;
    let mut parts = Vec::new();
    if let Some(shape) = sample_shape {
        let row_nbytes = shape.iter().product();
        let shards = shards(&content["shards"], place, 1, row_nbytes)?;
        parts.push(part("pixels", "image".into(), "|u1".into(), shape.to_vec(), row_nbytes, shards, content)?);
    } else {
        let has_shards = !list(&content["shards"], place, 0, usize::MAX)?.is_empty();
        let has_more = has_shards || content.contains_key("order") || is_squashed;
        need!(!has_more, "{place}: expected no shards, order or squashed without pixels");
    }
    let no_arrays = Object::new();
    let arrays = content.get("arrays").map_or(Ok(&no_arrays), |value| map(value, place))?;
    need!(arrays.len() <= 50, "{place}: expected at most 50 arrays");
    let is_whole = sample_shape.is_some() || arrays.keys().any(|name| name != "labels");
    need!(is_whole, "{place}: expected pixels, or an array besides labels");
    for (name, value) in arrays {
        need!(columns.iter().all(|(column, _)| column != name), "{name}: expected a name of no column");
        need!(name != "labels" || !has_label, "labels: expected an index without labels");
        parts.push(array(value, name, sample_shape)?);
    }
    let used: HashSet<_> = parts.iter().filter_map(|part| part.order).collect();
    let are_used = used.len() == orders.len() && used.iter().all(|&order| order < orders.len());
    need!(are_used, "{place}: expected orders that exist and are used");
    for part in &parts {
        let fits = part.order.is_some() || part.num_rows == num_samples;
        need!(fits, "{}: expected {num_samples} rows, found {}", part.name, part.num_rows);
    }
    let index = file(index, place)?;
    check_nbytes(&index, num_samples, row_nbytes)?;
    Ok(Split { num_samples, index, key_nbytes, has_label, columns, row_nbytes, orders, parts })
}

fn columns(value: &Value, place: &str) -> Result<Vec<(String, String)>> {
    let column = |value: &Value| {
        let pair = list(value, place, 2, 2)?;
        let name = text(&pair[0], place)?;
        check_identifier(&name, place, &FIELDS)?;
        Ok((name, one_of(&pair[1], place, &["<i8", "<f8"])?))
    };
    let columns = list(value, place, 1, 50)?.iter().map(column).collect::<Result<Vec<_>>>()?;
    check_distinct(columns.iter().map(|(name, _)| name), place)?;
    Ok(columns)
}

fn part(
    name: &str,
    kind: String,
    dtype: String,
    shape: Vec<u64>,
    row_nbytes: u64,
    shards: Vec<Entry>,
    content: &Object,
) -> Result<Part> {
    let num_rows = shards.iter().try_fold(0u64, |sum, shard| sum.checked_add(shard.num_rows));
    let num_rows = num_rows.ok_or_else(|| Error(format!("{name}: expected fewer rows")))?;
    let order = content.get("order").map(|value| count(value, name, 0, MAX_COUNT)).transpose()?;
    let order = order.map(|order| order as usize);
    Ok(Part { name: name.into(), kind, dtype, shape, row_nbytes, num_rows, shards, crc32: None, order })
}

fn array(value: &Value, name: &str, sample_shape: Option<&[u64]>) -> Result<Part> {
    check_identifier(name, "arrays", &RESERVED)?;
    let content = object(value, name, &["kind", "dtype", "shape", "crc32", "shards"], &["order", "names"])?;
    let kind = one_of(&content["kind"], name, &["array", "mask", "boxes", "image"])?;
    let dtype = one_of(&content["dtype"], name, &DTYPES)?;
    let shape = sides(&content["shape"], name, 0, 8)?;
    let item_nbytes = u64::from(dtype.as_bytes()[2] - b'0');
    let row_nbytes = shape.iter().try_fold(item_nbytes, |product, &side| product.checked_mul(side));
    let row_nbytes = row_nbytes.ok_or_else(|| Error(format!("{name}: expected fewer bytes")))?;
    let fits = match (kind.as_str(), sample_shape) {
        ("array", _) => name != "labels" || (dtype == "<f4" && shape.len() < 2),
        (_, None) => false,
        ("boxes", _) => dtype == "<f4" && shape.len() == 2 && shape[1] == 5,
        ("image", Some(sample)) => dtype == "|u1" && shape.len() == 3 && shape[2] == sample[2],
        (_, Some(sample)) => (2..=3).contains(&shape.len()) && shape[..2] == sample[..2],
    };
    need!(fits && (name != "labels" || kind == "array"), "{name}: expected another kind, type or shape");
    if let Some(names) = content.get("names") {
        need!(kind == "boxes", "{name}: expected names for boxes only");
        check_distinct(&texts(names, name, 1)?, name)?;
    }
    let shards = shards(&content["shards"], name, 1, row_nbytes)?;
    let mut part = part(name, kind, dtype, shape, row_nbytes, shards, content)?;
    part.crc32 = Some(table(&content["crc32"], name, part.num_rows, 4)?);
    Ok(part)
}
