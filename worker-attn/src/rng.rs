//! The sampler's random numbers: a pure function of (seed, choice, index of the generated token).
//!
//! Neighbours: `sampler.rs` asks for one number per sampled row. Nothing is carried from step to step, so a result depends neither on
//! who shares the batch, nor on preemption, nor on a restart of the worker.
//!
//! Construction: Philox4x32-10 (Salmon et al., SC'11; the generator of cuRAND and PyTorch) with
//!
//! * key = the 64-bit seed, low word first,
//! * counter = `[index low, index high, choice, 0]`,
//!
//! and the uniform number is the top 53 bits of `word1:word0` times 2⁻⁵³. Changing any of this changes every sampled answer: the golden
//! test below pins it.

const MUL: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// One Philox4x32-10 block.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let a = u64::from(MUL[0]) * u64::from(counter[0]);
        let b = u64::from(MUL[1]) * u64::from(counter[2]);
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
    }
    counter
}

/// The uniform number in [0, 1) for the `index`-th generated token of choice `choice`.
pub fn uniform(seed: u64, choice: u32, index: u64) -> f64 {
    let words = philox([index as u32, (index >> 32) as u32, choice, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(words[1]) << 32) | u64::from(words[0]);
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_the_published_vectors() {
        // Random123's kat_vectors, philox4x32 with 10 rounds.
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn the_numbers_are_pinned() {
        // From the first published vector: word1:word0 = e169c58d_6627e8d5.
        assert_eq!(uniform(0, 0, 0), (0xe169_c58d_6627_e8d5_u64 >> 11) as f64 / (1u64 << 53) as f64);
    }

    #[test]
    fn every_argument_matters_and_the_mean_is_a_half() {
        let base = uniform(7, 0, 0);
        assert!([uniform(8, 0, 0), uniform(7, 1, 0), uniform(7, 0, 1), uniform(7 << 32, 0, 0)].iter().all(|u| *u != base));
        let n = 20_000;
        let sum: f64 = (0..n).map(|i| uniform(42, 3, i)).sum();
        assert!((sum / n as f64 - 0.5).abs() < 0.01);
        assert!((0..n).all(|i| (0.0..1.0).contains(&uniform(42, 3, i))));
    }
}
