//! Recordings: moments in a file, or in memory.
//!
//! ```text
//! file     MAGIC  key  delta  delta …  depth  key  delta …
//! ```
//!
//! A key frame has a whole moment, a delta what changed since the moment before ([`leaves`]). Every
//! [`KEY_EVERY`]th moment is a key, and so is one with another shape, such as after a client came
//! or went. A moment is found by decoding the key before it and the deltas between.
//!
//! Each moment is written at once, so a recorder that is killed loses at most the one it was
//! writing. A reader passes over damage: it looks for the next frame with a right checksum, leaves
//! out deltas that miss their predecessor, and says what is lost ([`Damage`]).
//!
//! A checksum does not say who wrote a recording. What one small frame could make much of is
//! bounded where it is read: the length of a text, the deltas after a key, the clients of a matrix.

mod frame;
mod leaves;

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use serde::Deserialize;
use serde_json::Value;

use crate::moment::{Depth, Moment, Summary};
use frame::{FAMILY, HEAD, Kind, MAGIC, SYNC};

/// Moments from one key to the next, at most.
const KEY_EVERY: u32 = 60;
/// Moments and bytes that are kept in memory: an hour at one a second.
const MOST_MOMENTS: usize = 3600;
const MOST_BYTES: usize = 64 << 20;
/// Bytes that are looked through at a time for the next frame.
const SEARCH: usize = 64 << 10;
/// Bytes that are read for frames with a wrong checksum: these, and as many as the file has, eight
/// times. What comes then is damage.
const WRONG: u64 = 8 * frame::MAX_PAYLOAD as u64;

/// Why a recording cannot be read, or not be written as something else.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read the recording")]
    Io(#[from] io::Error),
    /// What is made of it cannot be written. Whoever writes says where.
    #[error(transparent)]
    Write(io::Error),
    /// Another file.
    #[error("this is no recording of `pageone record`")]
    NoRecording,
    /// The format of another build.
    #[error("the recording has format {0}, and this build reads format 1: use the `pageone` that wrote it")]
    OtherVersion(String),
    /// Nothing in it can be read.
    #[error("the recording has no moment that can be read; record again")]
    Empty,
    /// A moment's bytes have the right checksum and are not a moment.
    #[error(
        "the moment does not have the form of one: another build may have written it; use the `pageone` that \
             recorded it"
    )]
    Malformed,
}

/// Bytes of a recording that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Where they begin in the file.
    pub offset: u64,
    /// How many they are.
    pub bytes: u64,
    /// Moments behind them that cannot be read without them.
    pub moments: usize,
}

/// Makes frames of moments.
#[derive(Default)]
struct Encoder {
    last: Option<Value>,
    since_key: u32,
    number: u32,
}

impl Encoder {
    fn encode(&mut self, moment: &Moment) -> (Kind, Vec<u8>) {
        // A moment has no map whose keys are not strings, so this does not fail.
        let mut value = serde_json::to_value(moment).unwrap_or_default();
        leaves::round(&mut value);
        let delta = match &self.last {
            Some(last) if self.since_key + 1 < KEY_EVERY => leaves::difference(last, &value),
            _ => None,
        };
        let (kind, payload) = match delta {
            Some(changes) => (Kind::Delta, changes),
            None => (Kind::Key, value.to_string().into_bytes()),
        };
        self.since_key = if kind == Kind::Key { 0 } else { self.since_key + 1 };
        self.number = self.number.wrapping_add(1);
        self.last = Some(value);
        let payload = leaves::deflate(&payload);
        (kind, frame::encode(kind, self.number, moment.time, &moment.summary(), &payload))
    }
}

fn encode_depth(depth: &Depth) -> Vec<u8> {
    let payload = leaves::deflate(&serde_json::to_vec(depth).unwrap_or_default());
    frame::encode(Kind::Depth, 0, depth.time, &Summary::AWAY, &payload)
}

/// Writes a recording.
pub struct Writer<W> {
    out: W,
    encoder: Encoder,
    /// Bytes written.
    pub bytes: u64,
}

impl<W: Write> Writer<W> {
    /// Begins a recording.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn new(mut out: W) -> io::Result<Self> {
        out.write_all(&MAGIC)?;
        Ok(Self { out, encoder: Encoder::default(), bytes: MAGIC.len() as u64 })
    }

    /// What was written to.
    pub fn into_inner(self) -> W {
        self.out
    }

    /// Adds a moment, in one write.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn append(&mut self, moment: &Moment) -> io::Result<()> {
        let (_, bytes) = self.encoder.encode(moment);
        self.bytes += bytes.len() as u64;
        self.out.write_all(&bytes)
    }

    /// Adds what is asked for less often.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn append_depth(&mut self, depth: &Depth) -> io::Result<()> {
        let bytes = encode_depth(depth);
        self.bytes += bytes.len() as u64;
        self.out.write_all(&bytes)
    }
}

/// Where a frame is.
#[derive(Clone, Copy, Debug)]
struct Entry {
    kind: Kind,
    time: i64,
    summary: Summary,
    /// Offset of its payload in the file.
    offset: u64,
    length: usize,
}

/// Where the bytes are.
enum Store {
    File(File),
    Bytes(Vec<u8>),
    /// Frames of a live recording: the payloads of the entries.
    Live {
        frames: VecDeque<Vec<u8>>,
        encoder: Encoder,
        bytes: usize,
    },
}

impl Store {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Store::File(file) => file.read_exact_at(buffer, offset),
            Store::Bytes(bytes) => {
                let start = usize::try_from(offset).ok().filter(|&at| at <= bytes.len());
                let found = start.and_then(|at| bytes[at..].get(..buffer.len()));
                buffer.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
                Ok(())
            }
            Store::Live { .. } => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

/// A recording that is read.
pub struct Recording {
    store: Store,
    entries: VecDeque<Entry>,
    depths: Vec<Entry>,
    /// What cannot be read.
    pub damage: Vec<Damage>,
    /// The last decoded moment, and its place among the entries.
    decoded: Option<(usize, Value)>,
}

impl Recording {
    /// An empty one in memory, that keeps the last hour.
    pub fn live() -> Self {
        let store = Store::Live { frames: VecDeque::new(), encoder: Encoder::default(), bytes: 0 };
        Self { store, entries: VecDeque::new(), depths: Vec::new(), damage: Vec::new(), decoded: None }
    }

    /// Reads through a file.
    ///
    /// # Errors
    ///
    /// When it cannot be read, is no recording, or has no readable moment.
    pub fn open(file: File) -> Result<Self, Error> {
        let length = file.metadata()?.len();
        Self::scan(Store::File(file), length)
    }

    /// Reads through the bytes of a file.
    ///
    /// # Errors
    ///
    /// As [`Recording::open`].
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, Error> {
        let length = bytes.len() as u64;
        Self::scan(Store::Bytes(bytes), length)
    }

    fn scan(store: Store, length: u64) -> Result<Self, Error> {
        let mut magic = MAGIC;
        store.read_at(&mut magic, 0).map_err(|_| Error::NoRecording)?;
        if magic != MAGIC {
            return match magic.strip_prefix(FAMILY) {
                Some(version) => Err(Error::OtherVersion(String::from_utf8_lossy(version).trim().to_owned())),
                None => Err(Error::NoRecording),
            };
        }
        let mut recording =
            Self { store, entries: VecDeque::new(), depths: Vec::new(), damage: Vec::new(), decoded: None };
        recording.index(length)?;
        if recording.entries.is_empty() { Err(Error::Empty) } else { Ok(recording) }
    }

    /// Finds all frames.
    fn index(&mut self, length: u64) -> io::Result<()> {
        let mut at = MAGIC.len() as u64;
        // The number that a delta must have.
        let mut next = None;
        let mut since_key = 0;
        let mut payload = Vec::new();
        let mut wrong = WRONG.saturating_add(length.saturating_mul(8));
        while at < length {
            payload.clear();
            let Some(head) = self.frame_at(at, length, &mut payload)? else {
                wrong = wrong.saturating_sub(payload.len() as u64);
                let found = if wrong > 0 { self.search(at + 1, length)? } else { length };
                self.damage.push(Damage { offset: at, bytes: found - at, moments: 0 });
                at = found;
                continue;
            };
            let offset = at + HEAD as u64;
            let entry = Entry { kind: head.kind, time: head.time, summary: head.summary, offset, length: head.length };
            at = offset + head.length as u64;
            since_key = if head.kind == Kind::Key { 0 } else { since_key + u32::from(head.kind == Kind::Delta) };
            match head.kind {
                Kind::Depth => self.depths.push(entry),
                Kind::Delta if next != Some(head.number) || since_key >= KEY_EVERY => {
                    next = None;
                    match self.damage.last_mut() {
                        Some(damage) => damage.moments += 1,
                        None => self.damage.push(Damage { offset, bytes: 0, moments: 1 }),
                    }
                }
                Kind::Key | Kind::Delta => {
                    next = Some(head.number.wrapping_add(1));
                    self.entries.push_back(entry);
                }
            }
        }
        Ok(())
    }

    /// The frame at this offset, with its payload, if there is a whole one.
    fn frame_at(&self, at: u64, length: u64, payload: &mut Vec<u8>) -> io::Result<Option<frame::Head>> {
        let mut bytes = [0; HEAD];
        if length - at < HEAD as u64 {
            return Ok(None);
        }
        self.store.read_at(&mut bytes, at)?;
        let Some(head) = frame::decode(&bytes) else { return Ok(None) };
        if length - at - (HEAD as u64) < head.length as u64 {
            return Ok(None);
        }
        payload.resize(head.length, 0);
        self.store.read_at(payload, at + HEAD as u64)?;
        Ok(head.fits(payload).then_some(head))
    }

    /// Where the next bytes are that a frame begins with; the end if there are none.
    fn search(&self, mut from: u64, length: u64) -> io::Result<u64> {
        let mut buffer = vec![0; SEARCH];
        while from + SYNC.len() as u64 <= length {
            let count = SEARCH.min((length - from) as usize);
            self.store.read_at(&mut buffer[..count], from)?;
            if let Some(found) = buffer[..count].windows(SYNC.len()).position(|bytes| bytes == SYNC) {
                return Ok(from + found as u64);
            }
            from += (count - SYNC.len() + 1) as u64;
        }
        Ok(length)
    }

    /// How many moments there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it is still empty.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// When moment `at` was, in milliseconds since 1970.
    pub fn time(&self, at: usize) -> Option<i64> {
        self.entries.get(at).map(|entry| entry.time)
    }

    /// The graph's figures of moment `at`.
    pub fn summary(&self, at: usize) -> Option<&Summary> {
        self.entries.get(at).map(|entry| &entry.summary)
    }

    /// The last moment that is not after this time; the first if all are.
    pub fn find(&self, time: i64) -> usize {
        self.entries.partition_point(|entry| entry.time <= time).saturating_sub(1)
    }

    /// Moment `at`.
    ///
    /// # Errors
    ///
    /// When it cannot be read, or there is no such moment.
    pub fn moment(&mut self, at: usize) -> Result<Moment, Error> {
        if at >= self.entries.len() {
            return Err(Error::Empty);
        }
        let key = (0..=at).rev().find(|&at| self.entries[at].kind == Kind::Key).ok_or(Error::Malformed)?;
        let (mut done, mut value) = match self.decoded.take() {
            Some((done, value)) if (key..=at).contains(&done) => (done, value),
            _ => (key, leaves::read(&self.payload(key)?).map_err(|_| Error::Malformed)?),
        };
        while done < at {
            leaves::apply(&mut value, &self.payload(done + 1)?).map_err(|_| Error::Malformed)?;
            done += 1;
        }
        let moment = Moment::deserialize(&value).map_err(|_| Error::Malformed);
        self.decoded = Some((at, value));
        Ok(Moment { time: self.entries[at].time, ..moment? })
    }

    /// What was asked for less often, last before this time; `i64::MAX`: the last of all.
    ///
    /// # Errors
    ///
    /// When it cannot be read.
    pub fn depth(&self, time: i64) -> Result<Option<Depth>, Error> {
        let Some(entry) = self.depths.iter().rev().find(|entry| entry.time <= time) else { return Ok(None) };
        let depth = leaves::read(&self.inflate(entry)?).ok().and_then(|value| Depth::deserialize(value).ok());
        Ok(Some(depth.ok_or(Error::Malformed)?.bounded()))
    }

    fn payload(&self, at: usize) -> Result<Vec<u8>, Error> {
        match &self.store {
            Store::Live { frames, .. } => leaves::inflate(&frames[at][HEAD..]).map_err(|_| Error::Malformed),
            _ => self.inflate(&self.entries[at]),
        }
    }

    fn inflate(&self, entry: &Entry) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; entry.length];
        self.store.read_at(&mut bytes, entry.offset)?;
        leaves::inflate(&bytes).map_err(|_| Error::Malformed)
    }

    /// Adds a moment to a live recording, and forgets the oldest if it is full.
    pub fn push(&mut self, moment: &Moment) {
        let Store::Live { frames, encoder, bytes, .. } = &mut self.store else { return };
        let (kind, frame) = encoder.encode(moment);
        let (time, summary) = (moment.time, moment.summary());
        self.entries.push_back(Entry { kind, time, summary, offset: 0, length: frame.len() - HEAD });
        *bytes += frame.len();
        frames.push_back(frame);
        let mut dropped = 0;
        // Deltas go with their key.
        while frames.len() > MOST_MOMENTS || *bytes > MOST_BYTES || self.entries[0].kind != Kind::Key {
            let (Some(_), Some(frame)) = (self.entries.pop_front(), frames.pop_front()) else { break };
            *bytes -= frame.len();
            dropped += 1;
            if self.entries.is_empty() {
                break;
            }
        }
        self.decoded = self.decoded.take().and_then(|(at, value)| Some((at.checked_sub(dropped)?, value)));
    }
}

#[cfg(test)]
mod tests;
