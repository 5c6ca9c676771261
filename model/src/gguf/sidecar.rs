//! ROCmFP's sidecars: the codebooks of tensors of types 105 (`p4mix`) and 106 (`gumix`), as a key of the file or a loose file beside it
//! (docs/checkpoints.md §5.1: the wire of the DS4 loader).
//!
//! Every count is checked before anything is allocated; trailing bytes, unknown surfaces, modes other than 0 and 1 and rotations are
//! errors: a codebook is used exactly as written or not at all.

use std::collections::BTreeMap;

use half::bf16;
use tandem_quant::{DType, rocmfp::Levels};

use super::reader::{GgufError, Reader};

/// Which of a layer's expert stacks an entry is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Surface {
    /// ffn_gate_exps.
    Gate,
    /// ffn_up_exps.
    Up,
    /// ffn_down_exps.
    Down,
}

/// The codebooks of one stack.
#[derive(Clone, Debug, PartialEq)]
pub struct Codebook {
    /// `[experts, out, in]`, as the tensor must have it.
    pub shape: [usize; 3],
    /// Levels of each expert.
    pub levels: Vec<Levels>,
}

/// All entries of a file's sidecars, by kind, layer and surface.
pub type Codebooks = BTreeMap<(Kind, u32, Surface), Codebook>;

/// One kind of sidecar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Type 105: down projections, books of 8, rotations (all 0).
    P4Mix,
    /// Type 106: any projection, books of 4.
    GuMix,
}

impl Surface {
    /// The stack's name in a file, behind `blk.N.`.
    pub const fn stack(self) -> &'static str {
        match self {
            Self::Gate => "ffn_gate_exps.weight",
            Self::Up => "ffn_up_exps.weight",
            Self::Down => "ffn_down_exps.weight",
        }
    }
}

impl Kind {
    /// Both.
    pub const ALL: [Self; 2] = [Self::P4Mix, Self::GuMix];

    /// Name in keys (`<arch>.NAME.sidecar`) and of loose files (`FILE.NAME.bin`).
    pub const fn name(self) -> &'static str {
        match self {
            Self::P4Mix => "p4mix",
            Self::GuMix => "gumix",
        }
    }

    /// The tensor type that it serves.
    pub const fn dtype(self) -> DType {
        match self {
            Self::P4Mix => DType::RocmFp3Mix,
            Self::GuMix => DType::RocmFp2Mix,
        }
    }

    const fn magic(self) -> &'static [u8; 8] {
        match self {
            Self::P4Mix => b"P4MIXv1\0",
            Self::GuMix => b"GUMIXs1\0",
        }
    }

    const fn book(self) -> usize {
        match self {
            Self::P4Mix => 8,
            Self::GuMix => 4,
        }
    }
}

/// Most experts and largest dimension that an entry may claim.
const MAX_EXPERTS: u32 = 65_536;
const MAX_DIM: u32 = 1 << 20;

/// Reads a sidecar and adds its entries.
///
/// # Errors
/// Anything but the exact wire; an entry that is already there.
pub fn read(kind: Kind, bytes: &[u8], into: &mut Codebooks) -> Result<(), GgufError> {
    let name = kind.name();
    let mut r = Reader::new(bytes);
    let magic: [u8; 8] = r.array(&format!("{name}'s magic"))?;
    if &magic != kind.magic() {
        let fused = if magic.starts_with(b"GUMIXv1") { " (the fused form, which is not read)" } else { "" };
        let got = format!("{:?}{fused}", String::from_utf8_lossy(&magic));
        return Err(GgufError::field(name, &format!("the magic {:?}", String::from_utf8_lossy(kind.magic())), &got));
    }
    let entries = r.u32(name)?;
    let _reserved = r.u32(name)?;
    for i in 0..entries {
        let what = format!("{name} entry {i}");
        let layer = r.u32(&what)?;
        let surface = match kind {
            Kind::P4Mix => Surface::Down,
            Kind::GuMix => match r.u32(&what)? {
                0 => Surface::Gate,
                1 => Surface::Up,
                2 => Surface::Down,
                other => return Err(GgufError::field(&what, "surface 0 (gate), 1 (up) or 2 (down)", &other.to_string())),
            },
        };
        let codebook = read_entry(kind, &mut r, &what)?;
        if into.insert((kind, layer, surface), codebook).is_some() {
            return Err(GgufError::field(&what, "one entry per tensor", &format!("a second one for layer {layer}, {surface:?}")));
        }
    }
    match r.left() {
        0 => Ok(()),
        left => Err(GgufError::field(name, &format!("nothing behind its {entries} entries"), &format!("{left} more bytes"))),
    }
}

fn read_entry(kind: Kind, r: &mut Reader<'_>, what: &str) -> Result<Codebook, GgufError> {
    let mut sized = |axis: &str, most: u32| -> Result<usize, GgufError> {
        let n = r.u32(what)?;
        if n == 0 || n > most { Err(GgufError::field(what, &format!("{axis} from 1 to {most}"), &n.to_string())) } else { Ok(n as usize) }
    };
    let shape = [sized("experts", MAX_EXPERTS)?, sized("out", MAX_DIM)?, sized("in", MAX_DIM)?];
    let (books, book) = (r.u32(what)?, r.u32(what)?);
    if (books, book as usize) != (2, kind.book()) {
        return Err(GgufError::field(what, &format!("2 books of {} levels", kind.book()), &format!("{books} of {book}")));
    }
    let experts = shape[0];
    let modes = r.take(experts as u64, what)?;
    if let Some(odd) = modes.iter().find(|m| **m > 1) {
        return Err(GgufError::field(what, "modes 0 and 1", &odd.to_string()));
    }
    if kind == Kind::P4Mix
        && let Some(odd) = r.take(experts as u64, what)?.iter().find(|rotation| **rotation != 0)
    {
        return Err(GgufError::field(what, "rotation 0", &odd.to_string()));
    }
    let values = r.take(experts as u64 * 2 * kind.book() as u64 * 2, what)?;
    let values: Vec<f32> = values.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect();
    let levels = modes.iter().zip(values.chunks_exact(2 * kind.book())).map(|(mode, pair)| match mode {
        0 => Levels::Fixed,
        _ => Levels::Books([pair[..kind.book()].to_vec(), pair[kind.book()..].to_vec()]),
    });
    Ok(Codebook { shape, levels: levels.collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    fn p4mix(modes: [u8; 2], rotations: [u8; 2]) -> Vec<u8> {
        let mut bytes = b"P4MIXv1\0".to_vec();
        bytes.extend(words(&[1, 0, 7, 2, 64, 32, 2, 8]));
        bytes.extend(modes);
        bytes.extend(rotations);
        (0..2 * 2 * 8).for_each(|i| bytes.extend(bf16::from_f32(i as f32).to_le_bytes()));
        bytes
    }

    #[test]
    fn entries_read_back_and_every_deviation_is_refused() {
        let mut all = Codebooks::new();
        read(Kind::P4Mix, &p4mix([0, 1], [0, 0]), &mut all).unwrap();
        let entry = &all[&(Kind::P4Mix, 7, Surface::Down)];
        assert_eq!(entry.shape, [2, 64, 32]);
        assert_eq!(entry.levels[0], Levels::Fixed);
        let Levels::Books(books) = &entry.levels[1] else { panic!("mode 1 has books") };
        assert_eq!((books[0][0], books[1][7]), (16.0, 31.0));

        let refused = |bytes: &[u8]| read(Kind::P4Mix, bytes, &mut Codebooks::new()).unwrap_err().to_string();
        assert!(refused(&p4mix([0, 2], [0, 0])).contains("modes 0 and 1"));
        assert!(refused(&p4mix([0, 1], [0, 1])).contains("rotation 0"));
        let good = p4mix([0, 1], [0, 0]);
        assert!(refused(&[good.as_slice(), &[0]].concat()).contains("1 more bytes"));
        for cut in 0..good.len() {
            assert!(!refused(&good[..cut]).is_empty());
        }
        assert!(read(Kind::P4Mix, &good, &mut all).unwrap_err().to_string().contains("a second one"));
        let fused = [b"GUMIXv1\0".as_slice(), &[0; 8]].concat();
        assert!(read(Kind::GuMix, &fused, &mut Codebooks::new()).unwrap_err().to_string().contains("fused form"));
        let surface = [b"GUMIXs1\0".as_slice(), &words(&[1, 0, 3, 5, 1, 1, 1, 2, 4])].concat();
        assert!(read(Kind::GuMix, &surface, &mut Codebooks::new()).unwrap_err().to_string().contains("surface"));
        let books = [b"GUMIXs1\0".as_slice(), &words(&[1, 0, 3, 1, 1, 1, 1, 2, 8])].concat();
        assert!(read(Kind::GuMix, &books, &mut Codebooks::new()).unwrap_err().to_string().contains("2 books of 4"));
    }
}
