//! Element and block types of stored tensors.

use std::fmt;

use half::{bf16, f16};

use crate::{
    blocks::{iq, k, legacy, lut, sink::values},
    float8::e4m3,
    rocmfp::{self, Levels},
};

/// Marks the types that GGUF files do not have.
const NO_GGML_ID: u32 = u32::MAX;

/// Declares [`DType`] and its size table: variant, name, ggml type id, elements and bytes of a block.
macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = ($name:literal, $ggml:expr, $elems:literal, $bytes:literal)),* $(,)?) => {
        /// How the elements of a stored tensor are laid out. Float types have blocks of one element.
        ///
        /// Everything that sizes, slices or dispatches on a matrix goes through these methods, so a new type is one row here, one
        /// dequantisation in [`crate::blocks`] and, where speed matters, one kernel per backend.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum DType {
            $($(#[$doc])* $variant,)*
        }

        impl DType {
            /// Every type.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Elements in one block along a row.
            pub const fn block_elems(self) -> usize {
                match self { $(Self::$variant => $elems,)* }
            }

            /// Bytes of one block.
            pub const fn block_bytes(self) -> usize {
                match self { $(Self::$variant => $bytes,)* }
            }

            /// The name used in messages and metrics.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Its id in GGUF files; `None` for types that only safetensors hold.
            pub const fn ggml_id(self) -> Option<u32> {
                let id = match self { $(Self::$variant => $ggml,)* };
                if id == NO_GGML_ID { None } else { Some(id) }
            }
        }
    };
}

dtypes! {
    /// IEEE single precision, little-endian.
    F32 = ("F32", 0, 1, 4),
    /// IEEE half precision, little-endian.
    F16 = ("F16", 1, 1, 2),
    /// bfloat16, little-endian.
    Bf16 = ("BF16", 30, 1, 2),
    /// ggml's Q4_0.
    Q4_0 = ("Q4_0", 2, 32, 18),
    /// ggml's Q4_1.
    Q4_1 = ("Q4_1", 3, 32, 20),
    /// ggml's Q5_0.
    Q5_0 = ("Q5_0", 6, 32, 22),
    /// ggml's Q5_1.
    Q5_1 = ("Q5_1", 7, 32, 24),
    /// ggml's Q8_0.
    Q8_0 = ("Q8_0", 8, 32, 34),
    /// ggml's Q2_K.
    Q2K = ("Q2_K", 10, 256, 84),
    /// ggml's Q3_K.
    Q3K = ("Q3_K", 11, 256, 110),
    /// ggml's Q4_K.
    Q4K = ("Q4_K", 12, 256, 144),
    /// ggml's Q5_K.
    Q5K = ("Q5_K", 13, 256, 176),
    /// ggml's Q6_K.
    Q6K = ("Q6_K", 14, 256, 210),
    /// ggml's IQ2_XXS.
    Iq2Xxs = ("IQ2_XXS", 16, 256, 66),
    /// ggml's IQ2_XS.
    Iq2Xs = ("IQ2_XS", 17, 256, 74),
    /// ggml's IQ3_XXS.
    Iq3Xxs = ("IQ3_XXS", 18, 256, 98),
    /// ggml's IQ1_S.
    Iq1S = ("IQ1_S", 19, 256, 50),
    /// ggml's IQ4_NL.
    Iq4Nl = ("IQ4_NL", 20, 32, 18),
    /// ggml's IQ3_S.
    Iq3S = ("IQ3_S", 21, 256, 110),
    /// ggml's IQ2_S.
    Iq2S = ("IQ2_S", 22, 256, 82),
    /// ggml's IQ4_XS.
    Iq4Xs = ("IQ4_XS", 23, 256, 136),
    /// ggml's IQ1_M.
    Iq1M = ("IQ1_M", 29, 256, 56),
    /// ggml's MXFP4.
    Mxfp4 = ("MXFP4", 39, 32, 17),
    /// ggml's NVFP4.
    Nvfp4 = ("NVFP4", 40, 64, 36),
    /// ROCmFP's Q3_1_ROCMFP3_MIX; levels may lie in a sidecar ([`crate::rocmfp`]).
    RocmFp3Mix = ("Q3_1_ROCMFP3_MIX", 105, 32, 14),
    /// ROCmFP's Q2_1_ROCMFP2_MIX; levels may lie in a sidecar ([`crate::rocmfp`]).
    RocmFp2Mix = ("Q2_1_ROCMFP2_MIX", 106, 32, 10),
    /// 8-bit floats of safetensors; scales beside them ([`crate::Scales`]).
    F8E4m3 = ("F8_E4M3", NO_GGML_ID, 1, 1),
    /// NVFP4 of safetensors: 16 elements in 8 bytes, even element in the low nibble; scales beside them.
    Nvfp4Pairs = ("NVFP4 (packed pairs)", NO_GGML_ID, 16, 8),
    /// MXFP4 of safetensors: 32 elements in 16 bytes, even element in the low nibble; scales beside them.
    Mxfp4Pairs = ("MXFP4 (packed pairs)", NO_GGML_ID, 32, 16),
}

impl DType {
    /// The type with a ggml id, if it is one that is read here.
    pub fn from_ggml(id: u32) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.ggml_id() == Some(id))
    }

    /// Bytes of `elems` consecutive elements of a row; `None` where they are no whole number of blocks.
    pub const fn row_bytes(self, elems: usize) -> Option<usize> {
        if elems.is_multiple_of(self.block_elems()) { Some(elems / self.block_elems() * self.block_bytes()) } else { None }
    }

    /// Whether elements are plain floats of 16 or 32 bits.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }

    /// Whether the scales lie beside the elements, in tensors of their own.
    pub const fn has_side_scales(self) -> bool {
        matches!(self, Self::F8E4m3 | Self::Nvfp4Pairs | Self::Mxfp4Pairs)
    }

    /// Writes whole blocks as f32, exactly as ggml's reference does. What lies beside the elements (scales,
    /// codebooks) is not applied here.
    ///
    /// # Panics
    /// Where `bytes` and `out` are not the same whole number of blocks.
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(Some(bytes.len()), self.row_bytes(out.len()), "{self}: {} elements", out.len());
        let block: fn(&[u8], &mut [f32]) = match self {
            Self::F32 => return floats::<4>(bytes, out, f32::from_le_bytes),
            Self::F16 => return floats::<2>(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
            Self::Bf16 => return floats::<2>(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
            Self::F8E4m3 => return floats::<1>(bytes, out, |[b]| e4m3(b)),
            Self::Nvfp4Pairs | Self::Mxfp4Pairs => lut::e2m1_pairs,
            Self::RocmFp3Mix | Self::RocmFp2Mix => return rocmfp::dequantize(self, &Levels::Fixed, bytes, out),
            Self::Q4_0 => |b, o| values::<32>(o, |v| legacy::q4_0(b, v)),
            Self::Q4_1 => |b, o| values::<32>(o, |v| legacy::q4_1(b, v)),
            Self::Q5_0 => |b, o| values::<32>(o, |v| legacy::q5_0(b, v)),
            Self::Q5_1 => |b, o| values::<32>(o, |v| legacy::q5_1(b, v)),
            Self::Q8_0 => legacy::q8_0,
            Self::Q2K => |b, o| values::<256>(o, |v| k::q2_k(b, v)),
            Self::Q3K => |b, o| values::<256>(o, |v| k::q3_k(b, v)),
            Self::Q4K => |b, o| values::<256>(o, |v| k::q4_k(b, v)),
            Self::Q5K => |b, o| values::<256>(o, |v| k::q5_k(b, v)),
            Self::Q6K => |b, o| values::<256>(o, |v| k::q6_k(b, v)),
            Self::Iq2Xxs => |b, o| values::<256>(o, |v| iq::iq2_xxs(b, v)),
            Self::Iq2Xs => |b, o| values::<256>(o, |v| iq::iq2_xs(b, v)),
            Self::Iq3Xxs => |b, o| values::<256>(o, |v| iq::iq3_xxs(b, v)),
            Self::Iq1S => |b, o| values::<256>(o, |v| iq::iq1_s(b, v)),
            Self::Iq4Nl => |b, o| values::<32>(o, |v| lut::iq4_nl(b, v)),
            Self::Iq3S => |b, o| values::<256>(o, |v| iq::iq3_s(b, v)),
            Self::Iq2S => |b, o| values::<256>(o, |v| iq::iq2_s(b, v)),
            Self::Iq4Xs => |b, o| values::<256>(o, |v| lut::iq4_xs(b, v)),
            Self::Iq1M => |b, o| values::<256>(o, |v| iq::iq1_m(b, v)),
            Self::Mxfp4 => lut::mxfp4,
            Self::Nvfp4 => lut::nvfp4,
        };
        for (bytes, out) in bytes.chunks_exact(self.block_bytes()).zip(out.chunks_exact_mut(self.block_elems())) {
            block(bytes, out);
        }
    }
}

/// Converts elements of `N` bytes.
fn floats<const N: usize>(bytes: &[u8], out: &mut [f32], convert: impl Fn([u8; N]) -> f32) {
    for (o, b) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *o = convert(*b);
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
