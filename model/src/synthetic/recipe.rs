//! Which tensors a synthetic checkpoint has, and how each is filled. Gains are chosen so that activations stay in a sane range and every
//! tensor matters to the logits.

use std::ops::Range;

use super::{TextConfig, hash::Stream};
use crate::{Ffn, Indexer, Mixer};

/// Which quantised releases would convert a tensor: decides the file it goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// Kept in bf16 by every release.
    Rest,
    /// FP8 in the native release.
    Linear,
    /// Routed experts.
    Expert,
}

/// How elements come from the random stream.
#[derive(Clone, Copy, Debug)]
enum Fill {
    /// `offset + gain · normal`.
    Normal { offset: f64, gain: f64 },
    /// Uniform in `[low, high)`.
    Uniform { low: f64, high: f64 },
    /// Normal, but each odd head (of `head` elements) is −0.75 times the even head before it: relu() of a pair of index heads is then never
    /// all zero, so that no two pools tie.
    OpposedHeads { head: u64, gain: f64 },
}

/// One tensor.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Published name.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// The release keeps it in F32.
    pub keeps_f32: bool,
    /// Its file.
    pub group: Group,
    stream: Stream,
    fill: Fill,
}

impl Recipe {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends elements `range` (row-major) to `out`.
    pub fn generate(&self, range: Range<usize>, out: &mut Vec<f32>) {
        let s = &self.stream;
        let range = range.start as u64..range.end as u64;
        match self.fill {
            Fill::Normal { offset, gain } => out.extend(range.map(|i| (offset + gain * s.normal(i)) as f32)),
            Fill::Uniform { low, high } => out.extend(range.map(|i| (low + (high - low) * s.uniform(i)) as f32)),
            Fill::OpposedHeads { head, gain } => out.extend(range.map(|i| {
                let odd = i / head % 2 == 1;
                let value = s.normal(if odd { i - head } else { i }) * gain;
                (if odd { -0.75 * value } else { value }) as f32
            })),
        }
    }
}

/// All tensors of a checkpoint.
pub fn recipes(c: &TextConfig, seed: u64, vision: bool) -> Vec<Recipe> {
    let mut b = Builder { c, seed, list: Vec::new() };
    b.trunk();
    if c.mtp {
        b.mtp();
    }
    if vision {
        b.vision();
    }
    b.list
}

const PREFIX: &str = "model.language_model.";

struct Builder<'a> {
    c: &'a TextConfig,
    seed: u64,
    list: Vec<Recipe>,
}

impl Builder<'_> {
    fn put(&mut self, name: String, shape: &[usize], fill: Fill, group: Group) {
        let stream = Stream::new(self.seed, &name);
        self.list.push(Recipe { name, shape: shape.to_vec(), keeps_f32: false, group, stream, fill });
    }

    fn put_f32(&mut self, name: String, shape: &[usize], fill: Fill) {
        self.put(name, shape, fill, Group::Rest);
        if let Some(last) = self.list.last_mut() {
            last.keeps_f32 = true;
        }
    }

    fn plain(&mut self, name: String, shape: &[usize], gain: f64) {
        self.put(name, shape, Fill::Normal { offset: 0.0, gain }, Group::Rest);
    }

    fn linear(&mut self, name: String, out: usize, input: usize, gain: f64, group: Group) {
        self.put(name, &[out, input], Fill::Normal { offset: 0.0, gain: gain / (input as f64).sqrt() }, group);
    }

    fn norm(&mut self, name: String, len: usize) {
        self.put(name, &[len], Fill::Normal { offset: 1.0, gain: 0.25 }, Group::Rest);
    }

    fn trunk(&mut self) {
        let c = self.c;
        let (d, n) = (c.hidden, c.streams);
        self.plain(format!("{PREFIX}embed_tokens.weight"), &[c.vocab, d], 1.0);
        for (i, spec) in c.layers.iter().enumerate() {
            let pre = format!("{PREFIX}layers.{i}.");
            self.norm(format!("{pre}input_layernorm.weight"), d);
            self.norm(format!("{pre}post_attention_layernorm.weight"), d);
            for site in ["attn", "ffn"] {
                self.linear(format!("{pre}hc_{site}_fn"), n * (n + 2), n * d, 1.0, Group::Rest);
                self.put_f32(format!("{pre}hc_{site}_base"), &[n * (n + 2)], Fill::Normal { offset: 0.0, gain: 0.7 });
                self.put_f32(format!("{pre}hc_{site}_scale"), &[3], Fill::Uniform { low: 0.5, high: 1.5 });
            }
            match spec.mixer {
                Mixer::Kda => self.kda(&format!("{pre}self_attn.")),
                Mixer::Mla { indexer } => self.mla(&format!("{pre}self_attn."), indexer == Indexer::Full),
            }
            match spec.ffn {
                Ffn::Dense => self.mlp(&format!("{pre}mlp."), c.intermediate, Group::Linear, 0.11),
                Ffn::Moe => self.moe(&format!("{pre}mlp.")),
            }
        }
        self.norm(format!("{PREFIX}norm.weight"), d);
        self.linear("lm_head.weight".to_owned(), c.vocab, d, 4.0, Group::Rest);
    }

    fn kda(&mut self, pre: &str) {
        let c = self.c;
        let (d, hd, width) = (c.hidden, c.kda_head_dim, c.kda_heads * c.kda_head_dim);
        for x in ["q", "k", "v"] {
            self.linear(format!("{pre}{x}_proj.weight"), width, d, 1.0, Group::Rest);
            self.plain(format!("{pre}{x}_conv1d.weight"), &[width, 1, c.conv], 0.55);
        }
        for x in ["f", "g"] {
            self.linear(format!("{pre}{x}_a_proj.weight"), hd, d, 1.0, Group::Rest);
            self.linear(format!("{pre}{x}_b_proj.weight"), width, hd, 1.5, Group::Rest);
        }
        self.put_f32(format!("{pre}A_log"), &[c.kda_heads], Fill::Uniform { low: -0.7, high: 0.9 });
        self.put_f32(format!("{pre}dt_bias"), &[width], Fill::Uniform { low: -6.0, high: 0.5 });
        self.linear(format!("{pre}b_proj.weight"), c.kda_heads, d, 1.5, Group::Rest);
        self.norm(format!("{pre}o_norm.weight"), hd);
        self.linear(format!("{pre}o_proj.weight"), d, width, 0.55, Group::Rest);
    }

    fn mla(&mut self, pre: &str, indexer: bool) {
        let c = self.c;
        let (d, h) = (c.hidden, c.attn_heads);
        self.linear(format!("{pre}q_a_proj.weight"), c.q_lora, d, 1.0, Group::Linear);
        self.norm(format!("{pre}q_a_layernorm.weight"), c.q_lora);
        self.linear(format!("{pre}q_b_proj.weight"), h * c.qk_dim, c.q_lora, 2.5, Group::Linear);
        self.linear(format!("{pre}kv_a_proj_with_mqa.weight"), c.kv_lora, d, 1.0, Group::Linear);
        self.norm(format!("{pre}kv_a_layernorm.weight"), c.kv_lora);
        self.linear(format!("{pre}kv_b_proj.weight"), h * (c.qk_dim + c.v_dim), c.kv_lora, 1.0, Group::Rest);
        self.linear(format!("{pre}o_proj.weight"), d, h * c.v_dim, 0.5, Group::Linear);
        if !indexer {
            return;
        }
        let (heads, dim) = (c.index_heads, c.index_dim);
        let fill = Fill::OpposedHeads { head: (dim * c.q_lora) as u64, gain: 2.0 / (c.q_lora as f64).sqrt() };
        self.put(format!("{pre}indexer.wq_b.weight"), &[heads * dim, c.q_lora], fill, Group::Rest);
        self.linear(format!("{pre}indexer.wk.weight"), dim, d, 1.0, Group::Rest);
        self.norm(format!("{pre}indexer.k_norm.weight"), dim);
        self.plain(format!("{pre}indexer.k_norm.bias"), &[dim], 0.3);
        self.linear(format!("{pre}indexer.weights_proj.weight"), heads, d, 1.5, Group::Rest);
        self.plain(format!("{pre}indexer.index_kpool_compress_ape"), &[c.kpool, dim], 1.0);
        self.linear(format!("{pre}indexer.index_kpool_compress_gate"), dim, d, 1.5, Group::Rest);
    }

    fn mlp(&mut self, pre: &str, inter: usize, group: Group, down: f64) {
        let d = self.c.hidden;
        self.linear(format!("{pre}gate_proj.weight"), inter, d, 2.2, group);
        self.linear(format!("{pre}up_proj.weight"), inter, d, 2.2, group);
        self.linear(format!("{pre}down_proj.weight"), d, inter, down, group);
    }

    fn moe(&mut self, pre: &str) {
        let c = self.c;
        self.linear(format!("{pre}gate.weight"), c.experts, c.hidden, 1.5, Group::Rest);
        self.put_f32(format!("{pre}gate.e_score_correction_bias"), &[c.experts], Fill::Uniform { low: -0.25, high: 0.25 });
        for e in 0..c.experts {
            self.mlp(&format!("{pre}experts.{e}."), c.moe_intermediate, Group::Expert, 0.07);
        }
        self.mlp(&format!("{pre}shared_experts."), c.moe_intermediate * c.shared_experts, Group::Linear, 0.07);
    }

    /// A draft block behind the trunk: a reader that serves the trunk skips it.
    fn mtp(&mut self) {
        let (d, pre) = (self.c.hidden, format!("{PREFIX}layers.{}.", self.c.layers.len()));
        for name in ["input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "shared_head.norm"] {
            self.norm(format!("{pre}{name}.weight"), d);
        }
        self.mla(&format!("{pre}self_attn."), true);
        self.moe(&format!("{pre}mlp."));
        self.linear(format!("{pre}eh_proj.weight"), d, 2 * d, 1.0, Group::Rest);
    }

    /// A vision tower of one block that is never run: a text-only reader skips it. Its streams are keyed without the prefix.
    fn vision(&mut self) {
        let out = self.c.hidden;
        let tower: &[(&str, &[usize])] = &[
            ("blocks.0.attn.k_norm.weight", &[16]),
            ("blocks.0.attn.proj.bias", &[32]),
            ("blocks.0.attn.proj.weight", &[32, 32]),
            ("blocks.0.attn.q_norm.weight", &[16]),
            ("blocks.0.attn.qkv.bias", &[96]),
            ("blocks.0.attn.qkv.weight", &[96, 32]),
            ("blocks.0.mlp.down_proj.bias", &[32]),
            ("blocks.0.mlp.down_proj.weight", &[32, 48]),
            ("blocks.0.mlp.gate_proj.bias", &[48]),
            ("blocks.0.mlp.gate_proj.weight", &[48, 32]),
            ("blocks.0.mlp.up_proj.bias", &[48]),
            ("blocks.0.mlp.up_proj.weight", &[48, 32]),
            ("blocks.0.norm1.weight", &[32]),
            ("blocks.0.norm2.weight", &[32]),
            ("downsample.bias", &[out]),
            ("downsample.weight", &[out, 32, 2, 2]),
            ("merger.down_proj.weight", &[out, 48]),
            ("merger.gate_proj.weight", &[48, out]),
            ("merger.post_projection_norm.bias", &[out]),
            ("merger.post_projection_norm.weight", &[out]),
            ("merger.proj.weight", &[out, out]),
            ("merger.up_proj.weight", &[48, out]),
            ("patch_embed.proj.bias", &[32]),
            ("patch_embed.proj.weight", &[32, 3, 2, 14, 14]),
            ("post_layernorm.weight", &[32]),
        ];
        for (name, shape) in tower {
            self.put((*name).to_owned(), shape, Fill::Normal { offset: 0.0, gain: 0.05 }, Group::Rest);
            if let Some(last) = self.list.last_mut() {
                last.name = format!("model.visual.{name}");
            }
        }
    }
}
