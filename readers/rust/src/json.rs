//! JSON as a manifest may have it, sha256 and crc32.
//!
//! A text is kept as canonical JSON, without its quotes: texts are equal if their strings are, and the digest is a hash
//! of a walk through the values. Lone surrogates, which no `String` can hold, are ASCII here.

use std::collections::BTreeMap;

use crate::{need, Error, Result};

pub type Object = BTreeMap<String, Value>;

pub enum Value {
    Null,
    Bool(bool),
    /// From 0 to 2**53: no other integer is a count.
    Count(u64),
    OtherNumber,
    Text(String),
    List(Vec<Value>),
    Object(Object),
}

struct Parser<'a> {
    data: &'a [u8],
    at: usize,
}

pub fn parse(data: &[u8]) -> Result<Value> {
    let mut parser = Parser { data, at: 0 };
    let value = parser.value(0)?;
    parser.space();
    need!(parser.at == data.len(), "manifest.json: expected one JSON object in ASCII");
    Ok(value)
}

impl Parser<'_> {
    fn peek(&self) -> u8 {
        self.data.get(self.at).copied().unwrap_or(0)
    }

    fn space(&mut self) {
        while b" \t\n\r".contains(&self.peek()) {
            self.at += 1;
        }
    }

    fn take(&mut self, token: &str) -> bool {
        let is_next = self.data[self.at..].starts_with(token.as_bytes());
        self.at += if is_next { token.len() } else { 0 };
        is_next
    }

    fn value(&mut self, depth: usize) -> Result<Value> {
        self.space();
        for (word, value) in [("true", Value::Bool(true)), ("false", Value::Bool(false)), ("null", Value::Null)] {
            if self.take(word) {
                return Ok(value);
            }
        }
        need!(depth <= 100 || !b"{[".contains(&self.peek()), "manifest.json: expected at most 100 levels");
        match self.peek() {
            b'"' => Ok(Value::Text(self.text()?)),
            b'{' => Ok(Value::Object(self.object(depth)?)),
            b'[' => Ok(Value::List(self.list(depth)?)),
            _ => self.number(),
        }
    }

    fn object(&mut self, depth: usize) -> Result<Object> {
        let mut object = Object::new();
        self.at += 1;
        self.space();
        while !self.take("}") {
            need!(object.is_empty() || self.take(","), "manifest.json: expected ',' between values");
            self.space();
            need!(self.peek() == b'"', "manifest.json: expected a key");
            let key = self.text()?;
            self.space();
            need!(self.take(":"), "manifest.json: expected ':' after {key:.80}");
            let value = self.value(depth + 1)?;
            need!(object.insert(key, value).is_none(), "manifest.json: expected distinct keys");
            self.space();
        }
        Ok(object)
    }

    fn list(&mut self, depth: usize) -> Result<Vec<Value>> {
        let mut list = Vec::new();
        self.at += 1;
        self.space();
        while !self.take("]") {
            need!(list.is_empty() || self.take(","), "manifest.json: expected ',' between values");
            list.push(self.value(depth + 1)?);
            self.space();
        }
        Ok(list)
    }

    fn digits(&mut self) -> usize {
        let start = self.at;
        while self.peek().is_ascii_digit() {
            self.at += 1;
        }
        self.at - start
    }

    fn number(&mut self) -> Result<Value> {
        let start = self.at;
        self.take("-");
        let has_zero = self.peek() == b'0';
        let whole = self.digits();
        let mut is_sound = whole == 1 || (whole > 1 && !has_zero);
        let mut is_integer = true;
        if self.take(".") {
            is_integer = false;
            is_sound &= self.digits() > 0;
        }
        if self.take("e") || self.take("E") {
            is_integer = false;
            let _ = self.take("+") || self.take("-");
            is_sound &= self.digits() > 0;
        }
        let token = String::from_utf8_lossy(&self.data[start..self.at]);
        is_sound &= if is_integer { token.len() <= 4300 } else { token.parse().is_ok_and(f64::is_finite) };
        need!(is_sound, "manifest.json: expected a JSON value in the range of float64, found {token:.80}");
        let count = if token == "-0" { Ok(0) } else { token.parse() };
        Ok(match count {
            Ok(count) if is_integer && count <= 1 << 53 => Value::Count(count),
            _ => Value::OtherNumber,
        })
    }

    fn text(&mut self) -> Result<String> {
        let mut text = String::new();
        let mut after_high = false;
        self.at += 1;
        loop {
            let byte = self.peek();
            if byte == b'"' && !after_high {
                self.at += 1;
                return Ok(text);
            }
            let unit = self.unit()?;
            let is_low = (0xdc00..0xe000).contains(&unit);
            let is_byte = (0xdc80..0xdd00).contains(&unit);
            need!(if after_high { is_low } else { !is_low || is_byte }, "manifest.json: expected no lone surrogate");
            after_high = (0xd800..0xdc00).contains(&unit);
            match unit {
                8 => text.push_str("\\b"),
                9 => text.push_str("\\t"),
                10 => text.push_str("\\n"),
                12 => text.push_str("\\f"),
                13 => text.push_str("\\r"),
                0x22 => text.push_str("\\\""),
                0x5c => text.push_str("\\\\"),
                0x20..=0x7e => text.push(unit as u8 as char),
                _ => text.push_str(&format!("\\u{unit:04x}")),
            }
        }
    }

    /// Returns the next unit of UTF-16 of a string.
    fn unit(&mut self) -> Result<u16> {
        let byte = self.peek();
        need!((0x20..0x80).contains(&byte) && byte != b'"', "manifest.json: expected a string in ASCII");
        self.at += 1;
        if byte != b'\\' {
            return Ok(u16::from(byte));
        }
        let escape = self.peek();
        self.at += 1;
        Ok(match escape {
            b'"' | b'\\' | b'/' => u16::from(escape),
            b'b' => 8,
            b'f' => 12,
            b'n' => 10,
            b'r' => 13,
            b't' => 9,
            _ => {
                let digits = self.data.get(self.at..self.at + 4).unwrap_or(b"");
                let is_sound = escape == b'u' && digits.len() == 4 && digits.iter().all(u8::is_ascii_hexdigit);
                need!(is_sound, "manifest.json: expected an escape of JSON");
                self.at += 4;
                let value = digits.iter().map(|&digit| (digit as char).to_digit(16).unwrap_or(0));
                value.fold(0, |unit, digit| unit * 16 + digit as u16)
            }
        })
    }
}

/// Returns canonical JSON, without the keys in `without` of the outermost object.
pub fn canonical(value: &Value, without: &[&str]) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(flag) => flag.to_string(),
        Value::Count(count) => count.to_string(),
        Value::OtherNumber => String::new(), // which no digest covers
        Value::Text(text) => format!("\"{text}\""),
        Value::List(list) => {
            let values: Vec<_> = list.iter().map(|value| canonical(value, &[])).collect();
            format!("[{}]", values.join(","))
        }
        Value::Object(object) => {
            let kept = object.iter().filter(|(key, _)| !without.contains(&key.as_str()));
            let pairs: Vec<_> = kept.map(|(key, value)| format!("\"{key}\":{}", canonical(value, &[]))).collect();
            format!("{{{}}}", pairs.join(","))
        }
    }
}

pub fn crc32(data: &[u8]) -> u32 {
    let step = |crc: u32| (crc >> 1) ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 };
    !data.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), |crc, _| step(crc)))
}

const SHA256_START: [u32; 8] =
    [0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19];
#[rustfmt::skip]
const SHA256_ROUNDS: [u32; 64] = [
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
];

fn sha256_block(state: &mut [u32; 8], block: &[u8]) {
    let mut w = [0u32; 64];
    for (i, word) in block.chunks_exact(4).enumerate() {
        w[i] = word.iter().fold(0, |value, &byte| value << 8 | u32::from(byte));
    }
    for i in 16..64 {
        let (a, b) = (w[i - 15], w[i - 2]);
        let low = a.rotate_right(7) ^ a.rotate_right(18) ^ a >> 3;
        let high = b.rotate_right(17) ^ b.rotate_right(19) ^ b >> 10;
        w[i] = w[i - 16].wrapping_add(low).wrapping_add(w[i - 7]).wrapping_add(high);
    }
    let mut v = *state;
    for i in 0..64 {
        let sum = v[4].rotate_right(6) ^ v[4].rotate_right(11) ^ v[4].rotate_right(25);
        let one = (v[4] & v[5]) ^ (!v[4] & v[6]);
        let one = v[7].wrapping_add(sum).wrapping_add(one).wrapping_add(SHA256_ROUNDS[i]).wrapping_add(w[i]);
        let sum = v[0].rotate_right(2) ^ v[0].rotate_right(13) ^ v[0].rotate_right(22);
        let two = sum.wrapping_add((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        v = [one.wrapping_add(two), v[0], v[1], v[2], v[3].wrapping_add(one), v[4], v[5], v[6]];
    }
    for (value, more) in state.iter_mut().zip(v) {
        *value = value.wrapping_add(more);
    }
}

/// Returns the sha256 in hexadecimal digits.
pub fn sha256(data: &[u8]) -> String {
    let mut state = SHA256_START;
    let blocks = data.chunks_exact(64);
    let mut last = blocks.remainder().to_vec();
    blocks.for_each(|block| sha256_block(&mut state, block));
    last.push(0x80);
    last.resize(if last.len() > 56 { 120 } else { 56 }, 0);
    last.extend((data.len() as u64 * 8).to_be_bytes());
    last.chunks_exact(64).for_each(|block| sha256_block(&mut state, block));
    state.iter().map(|word| format!("{word:08x}")).collect()
}
