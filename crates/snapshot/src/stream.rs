//! QEMU's migration stream of a guest that was not prepared: the RAM is taken out of it.
//!
//! The stream has a header and then sections. Those by the name `ram` hold pages, each with its
//! place; later ones overwrite earlier ones. All others follow the last page, and are the device
//! stream. [`split`] reads the stream once, gives the pages of the guest's RAM to its caller, and
//! keeps the rest: a stream as QEMU writes it for a prepared guest, which a clone reads. The pages
//! of other memory, such as the display's, stay in it. Whether the devices are whole, only QEMU
//! knows: its migration has completed then.
//!
//! Source: QEMU's docs/devel/migration, `migration/savevm.c` and `migration/ram.c`, 7.2 to 10.0.

use std::io::{self, BufReader, Read};

use mpool::BLOCK;

use crate::prepare::RAM;

const MAGIC: u32 = 0x5145_564d;
const VERSION: u32 = 3;
/// Kinds of sections.
const START: u8 = 1;
const PART: u8 = 2;
const END: u8 = 3;
const SUBSECTION: u8 = 5;
const CONFIGURATION: u8 = 7;
const COMMAND: u8 = 8;
const FOOTER: u8 = 0x7e;
/// Flags of a word about RAM, below its address.
const ZERO: u64 = 0x02;
const SIZES: u64 = 0x04;
const PAGE: u64 = 0x08;
const EOS: u64 = 0x10;
const CONTINUE: u64 = 0x20;
const FLAGS: u64 = BLOCK as u64 - 1;
/// Bytes of the device stream, at most.
pub(crate) const LONGEST: u64 = 1 << 30;
/// Bytes that are read at once.
const BUFFER: usize = 1 << 20;

/// Why a stream is not understood.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum StreamError {
    #[error("QEMU's stream ends too early")]
    Read(#[from] io::Error),
    #[error("QEMU's stream has {0}, which this program does not know")]
    Unknown(String),
    #[error(
        "QEMU's stream has more than {0} bytes beside the guest's RAM, which no snapshot can have: give its devices less memory"
    )]
    Long(u64),
    #[error(
        "QEMU's stream does not have the guest's RAM in one piece; start the guest by `pageone run \
             --snapshots`, with its RAM described by -m alone"
    )]
    NoRam,
}

/// Reads a stream to its end. `ram` are the bytes of the guest's RAM. `pages` gets the number and
/// the bytes of each of its pages, `None` for zeros, and says whether it goes on. The rest is
/// returned; in it the RAM has the name that it has in a clone.
///
/// # Errors
/// If the stream is not understood, ends too early, or `pages` stops it.
pub(crate) fn split(
    stream: impl Read,
    ram: u64,
    pages: impl FnMut(u64, Option<&[u8; BLOCK]>) -> bool,
) -> Result<Vec<u8>, StreamError> {
    let from = BufReader::with_capacity(BUFFER, stream);
    let mut splitter = Splitter { from, out: Vec::new(), ram, main: None, block: String::new(), pages };
    splitter.header()?;
    while !splitter.section()? {}
    // Devices are not looked at.
    rest(splitter.from, splitter.out, LONGEST)
}

/// Reads a device stream alone to its end, whatever becomes of it: the guard has the pipe too, so
/// QEMU would not fail, but wait.
pub(crate) fn devices(mut from: impl Read, most: u64) -> Result<Vec<u8>, StreamError> {
    let bytes = rest(&mut from, Vec::new(), most);
    let _ = io::copy(&mut from, &mut io::sink());
    bytes
}

/// Reads the rest of a device stream, which may have `most` bytes, behind what there is of it.
fn rest(from: impl Read, mut out: Vec<u8>, most: u64) -> Result<Vec<u8>, StreamError> {
    from.take((most + 1).saturating_sub(out.len() as u64)).read_to_end(&mut out)?;
    if out.len() as u64 > most { Err(StreamError::Long(most)) } else { Ok(out) }
}

struct Splitter<R, P> {
    from: BufReader<R>,
    /// What is kept.
    out: Vec<u8>,
    ram: u64,
    /// QEMU's name for the guest's RAM.
    main: Option<String>,
    /// The block of the last page.
    block: String,
    pages: P,
}

impl<R: Read, P: FnMut(u64, Option<&[u8; BLOCK]>) -> bool> Splitter<R, P> {
    fn bytes<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.from.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Reads bytes, and keeps them.
    fn keep<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let bytes = self.bytes::<N>()?;
        self.out.extend(bytes);
        Ok(bytes)
    }

    fn keep_long(&mut self, len: usize) -> io::Result<&[u8]> {
        let start = self.out.len();
        self.out.resize(start + len, 0);
        self.from.read_exact(&mut self.out[start..])?;
        Ok(&self.out[start..])
    }

    /// Refuses more than a device stream may have, before it is kept.
    fn bound(&self) -> Result<(), StreamError> {
        if self.out.len() as u64 > LONGEST { Err(StreamError::Long(LONGEST)) } else { Ok(()) }
    }

    fn word(&mut self) -> io::Result<u64> {
        Ok(u64::from_be_bytes(self.bytes()?))
    }

    /// A name with its length before it.
    fn name(&mut self) -> io::Result<String> {
        let [len] = self.bytes()?;
        let mut name = vec![0; len.into()];
        self.from.read_exact(&mut name)?;
        Ok(String::from_utf8_lossy(&name).into_owned())
    }

    fn put_name(&mut self, name: &str) {
        // Names of blocks have at most 255 bytes.
        self.out.push(name.len() as u8);
        self.out.extend(name.as_bytes());
    }

    fn header(&mut self) -> Result<(), StreamError> {
        let unknown = |what: &str| Err(StreamError::Unknown(what.into()));
        if u32::from_be_bytes(self.keep()?) != MAGIC {
            return unknown("no header");
        }
        if u32::from_be_bytes(self.keep()?) != VERSION {
            return unknown("another version");
        }
        let [kind] = self.keep()?;
        if kind != CONFIGURATION {
            return unknown("no description of the machine");
        }
        let len = u32::from_be_bytes(self.keep()?);
        if len > 256 {
            return unknown("a long name of a machine");
        }
        self.keep_long(len as usize)?;
        Ok(())
    }

    /// A section up to the end of RAM; gives whether it is that.
    fn section(&mut self) -> Result<bool, StreamError> {
        let [kind] = self.bytes()?;
        self.bound()?;
        let start = self.out.len();
        self.out.push(kind);
        match kind {
            SUBSECTION => self.subsection()?,
            COMMAND => {
                let [_, _, high, low] = self.keep()?;
                self.keep_long(u16::from_be_bytes([high, low]).into())?;
            }
            START | PART | END => {
                self.keep::<4>()?;
                if kind == START {
                    let [len] = self.keep()?;
                    let name = String::from_utf8_lossy(self.keep_long(len.into())?).into_owned();
                    if name != "ram" {
                        return Err(StreamError::Unknown(format!("a state of {name} that is sent in parts")));
                    }
                    self.keep::<8>()?;
                }
                let kept = self.ram_words()?;
                if kind == END && self.main.is_none() {
                    return Err(StreamError::NoRam);
                }
                // Its number is in front, and behind.
                if self.bytes::<1>()? != [FOOTER] {
                    return Err(StreamError::Unknown("a section without an end".into()));
                }
                self.out.push(FOOTER);
                self.keep::<4>()?;
                if kind == PART && !kept {
                    self.out.truncate(start);
                }
            }
            other => return Err(StreamError::Unknown(format!("a section of the kind {other} before the end of RAM"))),
        }
        Ok(kind == END)
    }

    /// A part of the machine's description: which migration capabilities are set, or the guest's
    /// number.
    fn subsection(&mut self) -> Result<(), StreamError> {
        let [len] = self.keep()?;
        let name = String::from_utf8_lossy(self.keep_long(len.into())?).into_owned();
        self.keep::<4>()?;
        match name.as_str() {
            "configuration/capabilities" => {
                for _ in 0..u32::from_be_bytes(self.keep()?) {
                    self.bound()?;
                    let [len] = self.keep()?;
                    self.keep_long(len.into())?;
                }
            }
            "configuration/uuid" => drop(self.keep::<16>()?),
            "configuration/target-page-bits" => drop(self.keep::<4>()?),
            _ => return Err(StreamError::Unknown(name)),
        }
        Ok(())
    }

    /// The words of a section about RAM; gives whether some are kept, beside the last.
    fn ram_words(&mut self) -> Result<bool, StreamError> {
        let mut kept = false;
        loop {
            self.bound()?;
            let word = self.word()?;
            let (address, flags) = (word & !FLAGS, word & FLAGS);
            match flags & !CONTINUE {
                EOS => {
                    self.out.extend(word.to_be_bytes());
                    return Ok(kept);
                }
                SIZES => {
                    self.out.extend(word.to_be_bytes());
                    self.sizes(address)?;
                    kept = true;
                }
                kind @ (ZERO | PAGE) => {
                    if flags & CONTINUE == 0 {
                        self.block = self.name()?;
                    }
                    kept |= self.page(kind, address)?;
                }
                other => return Err(StreamError::Unknown(format!("pages of the kind {other:#x}"))),
            }
        }
    }

    /// The blocks of memory and their lengths, with the address of each (`x-ignore-shared`).
    fn sizes(&mut self, mut left: u64) -> Result<(), StreamError> {
        while left > 0 {
            self.bound()?;
            let (name, len, address) = (self.name()?, self.word()?, self.word()?);
            // Devices' memory has a path.
            let is_ram = len == self.ram && !name.contains('/') && self.main.is_none();
            self.put_name(if is_ram { RAM } else { &name });
            if is_ram {
                self.main = Some(name);
            }
            self.out.extend([len.to_be_bytes(), address.to_be_bytes()].concat());
            left = left.checked_sub(len).filter(|_| len > 0).ok_or(StreamError::NoRam)?;
        }
        if self.main.is_some() { Ok(()) } else { Err(StreamError::NoRam) }
    }

    /// A page; gives whether it is kept.
    fn page(&mut self, kind: u64, address: u64) -> Result<bool, StreamError> {
        let mut bytes = [0; BLOCK];
        let mut fill = [0];
        let content = if kind == PAGE { &mut bytes[..] } else { &mut fill[..] };
        self.from.read_exact(content)?;
        if self.main.as_ref() != Some(&self.block) {
            let name = std::mem::take(&mut self.block);
            self.out.extend((address | kind).to_be_bytes());
            self.put_name(&name);
            self.out.extend(if kind == PAGE { &bytes[..] } else { &fill[..] });
            self.block = name;
            return Ok(true);
        }
        if address >= self.ram {
            return Err(StreamError::NoRam);
        }
        if kind == ZERO {
            // QEMU sends no other byte.
            bytes.fill(fill[0]);
        }
        let content = (kind == PAGE || fill[0] != 0).then_some(&bytes);
        if (self.pages)(address / BLOCK as u64, content) {
            Ok(false)
        } else {
            Err(StreamError::Read(io::ErrorKind::BrokenPipe.into()))
        }
    }
}

#[cfg(test)]
mod tests;
