//! AES-256-XTS (IEEE 1619) of sectors of 512 bytes, in place.
//!
//! The unit is what a medium writes at least, not a block: so a write that a power failure tears
//! leaves sectors that are the old or the new ones, as without encryption. A sector of zeros is
//! none that was written (one in 2^4096 would be): it reads as zeros, so that holes, and space that
//! was allocated or never written, read as they do without encryption.
//!
//! The crate `xts-mode` does one AES block after the other; here many are under way at once, which
//! is many times as fast. The tests compare the two.

use super::frame::is_zero;
use aes::Aes256;
use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};

/// Bytes of a sector.
pub(crate) const SECTOR: usize = 512;
/// AES blocks in it.
const UNITS: usize = SECTOR / 16;
/// Sectors that are under way at once: a block of the pool.
const AT_ONCE: usize = 8;

/// The keys of a file. They are wiped when it is dropped.
pub(crate) struct Xts {
    data: Aes256,
    tweak: Aes256,
}

impl Xts {
    pub(crate) fn new(key: &[u8; 64]) -> Self {
        let half = |at: usize| {
            let mut half = zeroize::Zeroizing::new([0; 32]);
            half.copy_from_slice(&key[at..at + 32]);
            Aes256::new(&Array(*half))
        };
        Self { data: half(0), tweak: half(32) }
    }

    /// Encrypts whole sectors, the first of which has this number.
    pub(crate) fn encrypt(&self, sectors: &mut [u8], first: u64) {
        self.each(sectors, first, |blocks| self.data.encrypt_blocks(blocks));
    }

    /// Decrypts whole sectors, the first of which has this number. Zeros stay zeros.
    pub(crate) fn decrypt(&self, sectors: &mut [u8], first: u64) {
        let mut rest = (first, sectors);
        while !rest.1.is_empty() {
            // Runs of what was written, and of what was not.
            let (number, sectors) = rest;
            let zero = is_zero(&sectors[..SECTOR.min(sectors.len())]);
            let run = sectors.chunks(SECTOR).take_while(|sector| is_zero(sector) == zero).count();
            let (run, later) = sectors.split_at_mut((run * SECTOR).min(sectors.len()));
            if !zero {
                self.each(run, number, |blocks| self.data.decrypt_blocks(blocks));
            }
            rest = (number + (run.len() / SECTOR) as u64, later);
        }
    }

    /// Gives the blocks of some sectors at a time to `cipher`, between two exclusive ors with the
    /// tweaks.
    fn each(&self, sectors: &mut [u8], first: u64, cipher: impl Fn(&mut [aes::Block])) {
        let mut masks = [0; AT_ONCE * UNITS];
        for (group, sectors) in (first..).step_by(AT_ONCE).zip(sectors.chunks_mut(AT_ONCE * SECTOR)) {
            let mut tweaks: [aes::Block; AT_ONCE] = [const { Array([0; 16]) }; AT_ONCE];
            for (number, tweak) in (group..).zip(&mut tweaks) {
                tweak.0[..8].copy_from_slice(&number.to_le_bytes());
            }
            self.tweak.encrypt_blocks(&mut tweaks);
            for (tweak, masks) in tweaks.iter().zip(masks.chunks_exact_mut(UNITS)) {
                fill(masks, u128::from_le_bytes(tweak.0));
            }
            let (blocks, _) = Array::slice_as_chunks_mut(sectors);
            mask(blocks, &masks);
            cipher(blocks);
            mask(blocks, &masks);
        }
    }
}

/// The tweaks of a sector's blocks: each the one before, times x in GF(2^128).
fn fill(masks: &mut [u128], mut tweak: u128) {
    for mask in masks {
        *mask = tweak;
        tweak = (tweak << 1) ^ ((tweak >> 127) * 0x87);
    }
}

fn mask(blocks: &mut [aes::Block], masks: &[u128]) {
    for (block, mask) in blocks.iter_mut().zip(masks) {
        block.0 = (u128::from_le_bytes(block.0) ^ mask).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(seed: u64, len: usize) -> Vec<u8> {
        (0..len as u64).map(|i| (i ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()[6]).collect()
    }

    #[test]
    fn sectors_are_those_of_the_standard_and_of_another_program() {
        // IEEE 1619-2018, vector 10: AES-256, data unit 0xff, bytes 0 to 255 twice.
        let digits = b"27182818284590452353602874713526624977572470936999595749669676273141592653589793238462643383279502884197169399375105820974944592";
        let digit = |byte: u8| byte - b'0';
        let key: Vec<u8> = digits.chunks(2).map(|two| digit(two[0]) << 4 | digit(two[1])).collect();
        let key: [u8; 64] = key.try_into().unwrap();
        let mut sector: Vec<u8> = (0..SECTOR).map(|i| i as u8).collect();
        let plain = sector.clone();
        let xts = Xts::new(&key);
        xts.encrypt(&mut sector, 0xff);
        assert_eq!(sector[..16], 0x1c3b_3a10_2f77_0386_e483_6c99_e370_cf9b_u128.to_be_bytes());
        xts.decrypt(&mut sector, 0xff);
        assert!(sector == plain);

        let [one, two] = [&key[..32], &key[32..]].map(|key| Aes256::new_from_slice(key).unwrap());
        let other = xts_mode::Xts128::new(one, two);
        for (sectors, first) in [(1, 0), (7, 3), (8, 1 << 40), (21, u64::MAX - 30)] {
            let plain = content(first, sectors * SECTOR);
            let (mut ours, mut theirs) = (plain.clone(), plain.clone());
            xts.encrypt(&mut ours, first);
            other.encrypt_area(&mut theirs, SECTOR, first.into(), xts_mode::get_tweak_default);
            assert!(ours == theirs && ours != plain);
            xts.decrypt(&mut ours, first);
            assert!(ours == plain);
        }
    }

    #[test]
    fn zeros_between_written_sectors_stay_zeros() {
        let xts = Xts::new(&[7; 64]);
        let plain = content(1, 9 * SECTOR);
        let mut bytes = plain.clone();
        xts.encrypt(&mut bytes, 4);
        for hole in [0, 3, 4, 8] {
            bytes[hole * SECTOR..][..SECTOR].fill(0);
        }
        xts.decrypt(&mut bytes, 4);
        for (i, (found, plain)) in bytes.chunks(SECTOR).zip(plain.chunks(SECTOR)).enumerate() {
            let hole = [0, 3, 4, 8].contains(&i);
            assert!(if hole { found.iter().all(|&byte| byte == 0) } else { found == plain }, "sector {i}");
        }
    }
}
