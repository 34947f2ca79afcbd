//! A moment as leaves: the codec of keys and deltas.
//!
//! A moment is a JSON value. A key frame has it whole. Its numbers, strings, booleans and nulls, in
//! the order of the text, are its leaves; what is left without them is its shape. A delta has the
//! leaves that differ from those of the moment before, which has the same shape:
//!
//! ```text
//! delta   for each changed leaf: how many are skipped (varint) · tag · value
//! ```
//!
//! Nothing here knows a field's name, so a new metric needs no new version of the format. Numbers
//! that are not whole are kept to four places behind the point.

use std::io::Read;

use flate2::Compression;
use flate2::read::{DeflateDecoder, DeflateEncoder};
use serde_json::{Number, Value};

use super::frame::MAX_PAYLOAD;

/// Places behind the point, as a factor.
const PLACES: f64 = 1e4;
/// Bytes of the longest text: what is longer is cut.
const LONGEST_TEXT: usize = 4096;
/// Up to this, a number times [`PLACES`] is exact.
const EXACT: f64 = 9e11;

const NULL: u8 = 0;
const FALSE: u8 = 1;
const TRUE: u8 = 2;
/// A signed varint is added to the whole number that was there.
const ADD: u8 = 3;
/// A whole number.
const WHOLE: u8 = 4;
/// A signed varint of ten thousandths is added to the number that was there.
const ADD_PLACES: u8 = 5;
/// A number's eight bytes.
const REAL: u8 = 6;
/// A string: length and bytes.
const TEXT: u8 = 7;
/// An unsigned number above `i64::MAX`.
const LARGE: u8 = 8;

/// Bytes that are not what they should be.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Malformed;

pub(super) fn deflate(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    // Reading from memory cannot fail.
    let _ = DeflateEncoder::new(bytes, Compression::fast()).read_to_end(&mut out);
    out
}

/// Inflates at most [`MAX_PAYLOAD`] bytes.
pub(super) fn inflate(bytes: &[u8]) -> Result<Vec<u8>, Malformed> {
    let mut out = Vec::new();
    let mut limited = DeflateDecoder::new(bytes).take(MAX_PAYLOAD as u64 + 1);
    limited.read_to_end(&mut out).map_err(|_| Malformed)?;
    if out.len() > MAX_PAYLOAD { Err(Malformed) } else { Ok(out) }
}

/// A moment's value, from its JSON.
pub(super) fn read(json: &[u8]) -> Result<Value, Malformed> {
    let mut value = serde_json::from_slice(json).map_err(|_| Malformed)?;
    each_leaf(&mut value, &mut |leaf| {
        if let Value::String(text) = leaf {
            cut(text);
        }
        true
    });
    Ok(value)
}

fn cut(text: &mut String) {
    if text.len() > LONGEST_TEXT {
        let end = (0..=LONGEST_TEXT).rev().find(|&at| text.is_char_boundary(at));
        text.truncate(end.unwrap_or_default());
        text.shrink_to_fit();
    }
}

/// Rounds every number to the places that are kept, so that a moment is the same live and recorded.
pub(super) fn round(value: &mut Value) {
    each_leaf(value, &mut |leaf| {
        if let Some(rounded) = leaf.as_f64().filter(|_| leaf.is_f64()).filter(|x| x.abs() < EXACT)
            && let Some(number) = Number::from_f64((rounded * PLACES).round() / PLACES)
        {
            *leaf = Value::Number(number);
        }
        true
    });
}

/// Calls `visit` with each leaf, in order, until it gives `false`.
fn each_leaf(value: &mut Value, visit: &mut dyn FnMut(&mut Value) -> bool) -> bool {
    match value {
        Value::Array(items) => items.iter_mut().all(|item| each_leaf(item, visit)),
        Value::Object(fields) => fields.values_mut().all(|field| each_leaf(field, visit)),
        leaf => visit(leaf),
    }
}

/// The changes that make `new` of `old`; `None` if their shapes differ.
pub(super) fn difference(old: &Value, new: &Value) -> Option<Vec<u8>> {
    let mut writer = Writer { out: Vec::new(), skipped: 0 };
    writer.compare(old, new).then_some(writer.out)
}

struct Writer {
    out: Vec<u8>,
    /// Equal leaves since the last change.
    skipped: u64,
}

impl Writer {
    fn compare(&mut self, old: &Value, new: &Value) -> bool {
        match (old, new) {
            (Value::Array(old), Value::Array(new)) => {
                old.len() == new.len() && old.iter().zip(new).all(|(old, new)| self.compare(old, new))
            }
            (Value::Object(old), Value::Object(new)) => {
                let mut pairs = old.iter().zip(new);
                old.len() == new.len() && pairs.all(|(old, new)| old.0 == new.0 && self.compare(old.1, new.1))
            }
            (Value::Array(_) | Value::Object(_), _) | (_, Value::Array(_) | Value::Object(_)) => false,
            (old, new) if old == new => {
                self.skipped += 1;
                true
            }
            (old, new) => {
                put(&mut self.out, self.skipped);
                self.skipped = 0;
                write_leaf(&mut self.out, old, new);
                true
            }
        }
    }
}

fn write_leaf(out: &mut Vec<u8>, old: &Value, new: &Value) {
    match new {
        Value::Bool(value) => out.push(if *value { TRUE } else { FALSE }),
        Value::String(text) => {
            out.push(TEXT);
            put(out, text.len() as u64);
            out.extend(text.as_bytes());
        }
        Value::Number(number) => write_number(out, old, number),
        _ => out.push(NULL),
    }
}

fn write_number(out: &mut Vec<u8>, old: &Value, new: &Number) {
    if let Some(whole) = new.as_i64() {
        let before = old.as_i64().and_then(|old| whole.checked_sub(old));
        out.push(if before.is_some() { ADD } else { WHOLE });
        put(out, zigzag(before.unwrap_or(whole)));
    } else if let Some(large) = new.as_u64() {
        out.push(LARGE);
        put(out, large);
    } else {
        let real = new.as_f64().unwrap_or_default();
        match (places(old), places(&Value::Number(new.clone()))) {
            (Some(before), Some(now)) => {
                out.push(ADD_PLACES);
                put(out, zigzag(now - before));
            }
            _ => {
                out.push(REAL);
                out.extend(real.to_le_bytes());
            }
        }
    }
}

/// A number in ten thousandths, if it is a whole number of these.
fn places(value: &Value) -> Option<i64> {
    let real = value.as_f64().filter(|real| value.is_f64() && real.abs() < EXACT)?;
    let whole = (real * PLACES).round();
    (whole / PLACES == real).then_some(whole as i64)
}

/// Applies changes to a moment.
pub(super) fn apply(value: &mut Value, changes: &[u8]) -> Result<(), Malformed> {
    let mut reader = Reader(changes);
    if reader.0.is_empty() {
        return Ok(());
    }
    let mut skip = reader.number()?;
    let mut outcome = Ok(());
    let ended = each_leaf(value, &mut |leaf| {
        if skip > 0 {
            skip -= 1;
            return true;
        }
        match reader.leaf(leaf) {
            Ok(new) => *leaf = new,
            Err(why) => outcome = Err(why),
        }
        if outcome.is_err() || reader.0.is_empty() {
            return false;
        }
        match reader.number() {
            Ok(more) => skip = more,
            Err(why) => outcome = Err(why),
        }
        outcome.is_ok()
    });
    outcome?;
    // The leaves ended before the changes did.
    if ended { Err(Malformed) } else { Ok(()) }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take(&mut self, count: usize) -> Result<&[u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u64, Malformed> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(Malformed)
    }

    fn signed(&mut self) -> Result<i64, Malformed> {
        let value = self.number()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    fn leaf(&mut self, old: &Value) -> Result<Value, Malformed> {
        Ok(match self.take(1)?[0] {
            NULL => Value::Null,
            FALSE => Value::Bool(false),
            TRUE => Value::Bool(true),
            ADD => old.as_i64().and_then(|old| old.checked_add(self.signed().ok()?)).ok_or(Malformed)?.into(),
            WHOLE => self.signed()?.into(),
            LARGE => self.number()?.into(),
            ADD_PLACES => {
                let before = places(old).ok_or(Malformed)?;
                let now = before.checked_add(self.signed()?).ok_or(Malformed)?;
                real(now as f64 / PLACES)?
            }
            REAL => real(f64::from_le_bytes(*self.take(8)?.first_chunk().ok_or(Malformed)?))?,
            TEXT => {
                let length = usize::try_from(self.number()?).map_err(|_| Malformed)?;
                let mut text = std::str::from_utf8(self.take(length)?).map_err(|_| Malformed)?.to_owned();
                cut(&mut text);
                Value::String(text)
            }
            _ => return Err(Malformed),
        })
    }
}

fn real(value: f64) -> Result<Value, Malformed> {
    Number::from_f64(value).map(Value::Number).ok_or(Malformed)
}

fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)) as u64
}

fn put(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

#[cfg(test)]
mod tests;
