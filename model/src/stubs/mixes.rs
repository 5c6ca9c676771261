//! The quantised mixes that publishers ship as GGUF: a type for each tensor.
//!
//! Of unsloth's UD-IQ1_S and UD-Q2_K_XL the numbers of tensors by type are published (docs/checkpoints.md §4.7), and these two tables give exactly
//! them. Of the others the names are known; their tables follow the publisher's habits: stacked experts whose down differs from gate and
//! up, layers that get more bits than the rest, small matrices in Q8_0 (unsloth) or F32 (llama.cpp's converter), and llama-quantize's
//! fall-back types for rows that are no whole number of blocks.

use tandem_quant::DType;

use super::gguf::{GgufStub, HeadCounts};

/// Types of gate, up and down stacks.
type Experts = [DType; 3];

/// Which converter wrote the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writer {
    /// `glm5next`; small matrices Q8_0; layer 11 has more bits.
    Unsloth,
    /// `glm5-next`; mHC and pooling tensors F32.
    Upstream,
}

/// One shipped mix.
#[derive(Clone, Debug)]
pub struct Mix {
    /// Who publishes it.
    pub publisher: &'static str,
    /// Its name in file names.
    pub name: &'static str,
    writer: Writer,
    /// Types of the routed experts: so many layers each, in turn; the last takes the rest.
    bands: &'static [(usize, Experts)],
    /// Layer 11's, where it differs.
    outlier: Option<Experts>,
    /// The draft block's.
    draft: Experts,
    /// Types of the other large matrices: so many each, in turn; the last takes the rest.
    rest: &'static [(usize, DType)],
    /// Type of the small matrices; unsloth's are Q8_0 in quantised files.
    small: DType,
}

use DType::{
    Bf16, F32, Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, Iq4Nl, Iq4Xs, Mxfp4, Nvfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K,
    Q8_0,
};

const ALL: usize = usize::MAX;

macro_rules! unsloth {
    ($name:literal, [$(($n:expr, $gate_up:ident, $down:ident)),*], outlier $out:expr, rest [$(($m:expr, $rest:ident)),*], small $small:ident) => {
        Mix {
            publisher: "unsloth",
            name: $name,
            writer: Writer::Unsloth,
            bands: &[$(($n, [$gate_up, $gate_up, $down])),*],
            outlier: $out,
            draft: [Q2K, Q2K, Q3K],
            rest: &[$(($m, $rest)),*],
            small: $small,
        }
    };
}

macro_rules! upstream {
    ($publisher:literal, $name:literal, [$(($n:expr, $gate_up:ident, $down:ident)),*], rest [$(($m:expr, $rest:ident)),*]) => {
        Mix {
            publisher: $publisher,
            name: $name,
            writer: Writer::Upstream,
            bands: &[$(($n, [$gate_up, $gate_up, $down])),*],
            outlier: None,
            draft: [Q8_0, Q8_0, Q8_0],
            rest: &[$(($m, $rest)),*],
            small: F32,
        }
    };
}

/// Every mix: unsloth's, bartowski's, ggml-org's, and two block types that llama.cpp can write and nobody has published yet.
pub const MIXES: &[Mix] = &[
    unsloth!("UD-IQ1_S", [(26, Iq1S, Iq3Xxs), (2, Iq1S, Iq2Xxs), (ALL, Iq2Xxs, Iq3Xxs)], outlier Some([Iq4Xs; 3]),
        rest [(2, Q4K), (49, Q6K), (ALL, Q5K)], small Q8_0),
    unsloth!("UD-IQ1_M", [(28, Iq1M, Iq3Xxs), (ALL, Iq2Xxs, Iq3S)], outlier Some([Iq4Xs; 3]), rest [(2, Q4K), (60, Q6K), (ALL, Q5K)], small Q8_0),
    unsloth!("UD-IQ2_XXS", [(30, Iq2Xxs, Iq3Xxs), (ALL, Iq2Xs, Iq3S)], outlier Some([Q8_0, Q8_0, Q8_0]), rest [(1, Q4K), (80, Q6K), (ALL, Q5K)], small Q8_0),
    unsloth!("UD-Q2_K_XL", [(ALL, Iq2Xs, Iq3Xxs)], outlier Some([Iq4Xs; 3]), rest [(1, Q4K), (117, Q6K), (ALL, Q5K)], small Q8_0),
    unsloth!("UD-IQ3_XXS", [(20, Iq3Xxs, Iq4Xs), (ALL, Iq2S, Iq4Xs)], outlier Some([Iq3S, Iq3S, Q8_0]), rest [(120, Q6K), (ALL, Q5K)], small Q8_0),
    unsloth!("UD-Q3_K_XL", [(20, Q3K, Q4K), (ALL, Iq3S, Q4K)], outlier Some([Q5K; 3]), rest [(200, Q6K), (ALL, Q5K)], small Q8_0),
    unsloth!("UD-IQ4_XS", [(ALL, Iq3S, Iq4Xs)], outlier Some([Q8_0, Q8_0, Q8_0]), rest [(100, Q6K), (ALL, Q8_0)], small Q8_0),
    unsloth!("UD-Q4_K_XL", [(ALL, Q4K, Q5K)], outlier Some([Q6K; 3]), rest [(100, Q6K), (ALL, Q8_0)], small Q8_0),
    unsloth!("UD-Q5_K_XL", [(ALL, Q5K, Q6K)], outlier Some([Q8_0; 3]), rest [(50, Q6K), (ALL, Q8_0)], small Q8_0),
    unsloth!("UD-Q6_K_XL", [(ALL, Q6K, Q8_0)], outlier Some([Q8_0; 3]), rest [(ALL, Q8_0)], small Q8_0),
    unsloth!("Q8_0", [(ALL, Q8_0, Q8_0)], outlier None, rest [(ALL, Q8_0)], small Q8_0),
    unsloth!("BF16", [(ALL, Bf16, Bf16)], outlier None, rest [(ALL, Bf16)], small Bf16),
    upstream!("bartowski", "Q8_0", [(ALL, Q8_0, Q8_0)], rest[(ALL, Q8_0)]),
    upstream!("bartowski", "Q6_K", [(ALL, Q6K, Q6K)], rest[(ALL, Q6K)]),
    upstream!("bartowski", "Q6_K_S", [(ALL, Q6K, Q6K)], rest [(2, Q8_0), (ALL, Q6K)]),
    upstream!("bartowski", "Q5_K_M", [(5, Q5K, Q6K), (32, Q5K, Q5K), (ALL, Q5K, Q6K)], rest [(40, Q6K), (ALL, Q5K)]),
    upstream!("bartowski", "Q5_K_S", [(ALL, Q5K, Q5K)], rest [(1, Q6K), (ALL, Q5K)]),
    upstream!("bartowski", "Q4_1", [(ALL, Q4_1, Q4_1)], rest [(1, Q6K), (ALL, Q4_1)]),
    upstream!("bartowski", "Q4_0", [(5, Q4_0, Q4_1), (ALL, Q4_0, Q4_0)], rest [(1, Q6K), (ALL, Q4_0)]),
    upstream!("bartowski", "IQ4_NL", [(ALL, Iq4Nl, Iq4Nl)], rest [(1, Q6K), (20, Q5K), (ALL, Iq4Nl)]),
    upstream!("bartowski", "IQ4_XS", [(5, Iq4Xs, Q5K), (ALL, Iq4Xs, Iq4Xs)], rest [(1, Q6K), (20, Q5K), (ALL, Iq4Xs)]),
    upstream!("bartowski", "Q4_K_M", [(5, Q4K, Q6K), (32, Q4K, Q4K), (ALL, Q4K, Q6K)], rest [(40, Q6K), (ALL, Q4K)]),
    upstream!("bartowski", "Q4_K_S", [(5, Q4K, Q5K), (ALL, Q4K, Q4K)], rest [(1, Q6K), (20, Q5K), (ALL, Q4K)]),
    upstream!("bartowski", "Q3_K_L", [(ALL, Q3K, Q5K)], rest [(1, Q6K), (50, Q5K), (ALL, Q3K)]),
    upstream!("bartowski", "Q3_K_M", [(3, Q3K, Q5K), (ALL, Q3K, Q4K)], rest [(1, Q6K), (50, Q4K), (ALL, Q3K)]),
    upstream!("bartowski", "Q3_K_S", [(ALL, Q3K, Q3K)], rest [(1, Q6K), (ALL, Q3K)]),
    upstream!("bartowski", "IQ3_M", [(5, Iq3S, Q4K), (ALL, Iq3S, Iq3S)], rest [(1, Q6K), (40, Q4K), (ALL, Iq3S)]),
    upstream!("bartowski", "IQ3_XS", [(21, Iq3S, Iq3S), (ALL, Iq3Xxs, Iq3S)], rest [(1, Q6K), (ALL, Iq3S)]),
    upstream!("bartowski", "IQ3_XXS", [(5, Iq3Xxs, Iq3S), (ALL, Iq3Xxs, Iq3Xxs)], rest [(1, Q5K), (40, Iq2S), (ALL, Iq3Xxs)]),
    upstream!("bartowski", "Q2_K", [(ALL, Q2K, Q3K)], rest [(1, Q6K), (40, Q4K), (ALL, Q2K)]),
    upstream!("bartowski", "IQ2_M", [(5, Iq2S, Iq3S), (ALL, Iq2S, Iq2S)], rest [(1, Q5K), (40, Iq3S), (ALL, Iq2S)]),
    upstream!("bartowski", "IQ2_S", [(5, Iq2Xs, Iq3S), (ALL, Iq2Xs, Iq2Xs)], rest [(1, Q5K), (40, Iq3S), (ALL, Iq2Xs)]),
    upstream!("bartowski", "IQ2_XS", [(5, Iq2Xs, Q2K), (ALL, Iq2Xs, Iq2Xs)], rest [(1, Q5K), (40, Q4K), (ALL, Iq2Xs)]),
    upstream!("bartowski", "IQ2_XXS", [(5, Iq2Xxs, Q2K), (ALL, Iq2Xxs, Iq2Xxs)], rest [(1, Q5K), (40, Q4K), (ALL, Iq2Xxs)]),
    upstream!("bartowski", "IQ1_M", [(5, Iq1M, Q2K), (ALL, Iq1M, Iq1M)], rest [(1, Q5K), (40, Q4K), (ALL, Iq1M)]),
    upstream!("bartowski", "IQ1_S", [(5, Iq1S, Q2K), (ALL, Iq1S, Iq1S)], rest [(1, Q5K), (40, Q4K), (ALL, Iq1S)]),
    upstream!("ggml-org", "Q2_K", [(ALL, Q2K, Q2K)], rest[(ALL, Q8_0)]),
    upstream!("ggml-org", "Q4_K", [(ALL, Q4K, Q4K)], rest[(ALL, Q8_0)]),
    upstream!("llama.cpp", "MXFP4", [(ALL, Mxfp4, Mxfp4)], rest[(ALL, Q8_0)]),
    upstream!("llama.cpp", "NVFP4", [(ALL, Nvfp4, Nvfp4)], rest[(ALL, Q8_0)]),
];

/// Unsloth's outlier layer.
const OUTLIER: usize = 11;

impl Mix {
    /// The mix of a publisher.
    pub fn find(publisher: &str, name: &str) -> Option<&'static Self> {
        MIXES.iter().find(|mix| mix.publisher == publisher && mix.name == name)
    }

    /// The file name's stem.
    pub fn stem(&self) -> String {
        format!("GLM-5.3-Flash-{}", self.name)
    }

    /// The whole model in this mix, with a vocabulary of `tokens` entries (the model's, or fewer for a smaller file). NVFP4 stacks have
    /// their `.scale` beside them.
    pub fn stub(&self, tokens: usize) -> GgufStub {
        let config = super::config();
        let (arch, counts) = match self.writer {
            Writer::Unsloth => ("glm5next", HeadCounts::Absent),
            Writer::Upstream => ("glm5-next", HeadCounts::PerBlock),
        };
        let rest = std::cell::Cell::new(0);
        let mut stub = GgufStub::new(&config, arch, counts, tokens, |name, shape| self.type_of(name, shape, &rest));
        let scales: Vec<_> = stub.tensors.iter().filter(|t| Some(t.ggml_type) == Nvfp4.ggml_id()).cloned().collect();
        for mut tensor in scales {
            tensor.name = tensor.name.replace(".weight", ".scale");
            tensor.shape.truncate(1);
            tensor.ggml_type = 0;
            stub.tensors.push(tensor);
        }
        stub
    }

    /// `rest` counts the large matrices that came before.
    fn type_of(&self, name: &str, shape: &[usize], rest: &std::cell::Cell<usize>) -> DType {
        let (block, tensor) = match name.strip_prefix("blk.").and_then(|s| s.split_once('.')) {
            Some((block, tensor)) => (block.parse::<usize>().ok(), tensor),
            None => (None, name),
        };
        if shape.len() < 2
            || tensor.starts_with("ssm_conv1d")
            || tensor.starts_with("indexer_compressor_ape")
            || tensor == "ffn_gate_inp.weight"
        {
            return F32;
        }
        if let Some(place) = ["ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"].iter().position(|n| *n == tensor) {
            return self.experts(block.unwrap_or(0))[place];
        }
        let small = ["hc_", "ssm_", "indexer", "attn_k_b", "attn_v_b"].iter().any(|p| tensor.starts_with(p));
        let plain = match self.writer {
            Writer::Unsloth if tensor == "indexer.proj.weight" => F32,
            Writer::Unsloth if small => self.small,
            // What the published census counts as Q8_0 beside the small ones.
            Writer::Unsloth if tensor.starts_with("attn_q_a") || tensor.starts_with("attn_kv_a") || tensor.contains("eh_proj") => {
                self.small
            }
            Writer::Unsloth if block == Some(45) && tensor == "attn_output.weight" => self.small,
            Writer::Upstream if tensor.starts_with("hc_") || tensor.starts_with("indexer_compressor") => F32,
            _ => {
                let n = rest.replace(rest.get() + 1);
                turn(self.rest, n)
            }
        };
        fallback(plain, shape.last().copied().unwrap_or(0))
    }

    fn experts(&self, layer: usize) -> Experts {
        match (layer, self.outlier) {
            (45, _) => self.draft,
            (OUTLIER, Some(types)) => types,
            _ => turn(self.bands, (3..layer).filter(|l| self.outlier.is_none() || *l != OUTLIER).count()),
        }
    }
}

/// The entry whose turn it is after `n` others.
fn turn<T: Copy>(bands: &[(usize, T)], mut n: usize) -> T {
    for (count, value) in bands {
        if n < *count {
            return *value;
        }
        n -= count;
    }
    bands[bands.len() - 1].1
}

/// llama-quantize's type for rows that are no whole number of blocks.
fn fallback(dtype: DType, row: usize) -> DType {
    if row.is_multiple_of(dtype.block_elems()) {
        return dtype;
    }
    match dtype {
        Q4K => Q5_0,
        Q5K => Q5_1,
        Q6K => Q8_0,
        _ => Iq4Nl,
    }
}
