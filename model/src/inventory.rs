//! Which tensors a geometry needs, by canonical name, with their shapes.
//!
//! Some parts of a layer are stored in one of several ways; what is there decides: the three convolutions of a KDA layer apart or fused
//! (`conv1d`), the routed experts one by one or stacked (`experts.gate_up_proj` with `experts.down_proj`; GGUF: three stacks), and in
//! GGUF A_log as its negated exponential and kv_b_proj in two halves.
//!
//! Neighbours: `checkpoint.rs` checks this list when it opens a folder, `tensors.rs` reads by the same names.

use crate::{
    Ffn, Geometry, Indexer, Mixer,
    checkpoint::{KEY_UP, NEG_EXP, VALUE_UP},
};

/// One tensor that must exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// Canonical name.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// The release keeps it in F32; a narrower copy has lost digits for good.
    pub keeps_f32: bool,
    /// Part of the routed experts.
    pub routed: bool,
    /// A weight matrix (or a stack of them): may be stored in any type. Everything else is read as plain values.
    pub matrix: bool,
}

impl Need {
    /// The layer that it belongs to.
    pub fn layer(&self) -> Option<usize> {
        self.name.strip_prefix("layers.")?.split_once('.')?.0.parse().ok()
    }
}

/// Everything the trunk needs. `has` tells whether a canonical name is stored.
pub fn needs(g: &Geometry, has: impl Fn(&str) -> bool) -> Vec<Need> {
    let mut list = List(Vec::new());
    list.add_matrix("embed_tokens.weight", &[g.vocab, g.hidden]);
    list.add("norm.weight", &[g.hidden]);
    if !g.tied || has("lm_head.weight") {
        list.add_matrix("lm_head.weight", &[g.vocab, g.hidden]);
    }
    for (i, spec) in g.layer_specs.iter().enumerate() {
        let layer = format!("layers.{i}.");
        list.add(format!("{layer}input_layernorm.weight"), &[g.hidden]);
        list.add(format!("{layer}post_attention_layernorm.weight"), &[g.hidden]);
        for site in ["attn", "ffn"] {
            list.add_matrix(format!("{layer}hc_{site}_fn"), &[g.hc_rows(), g.streams * g.hidden]);
            list.add_f32(format!("{layer}hc_{site}_base"), &[g.hc_rows()]);
            list.add_f32(format!("{layer}hc_{site}_scale"), &[3]);
        }
        match spec.mixer {
            Mixer::Kda => kda(&mut list, g, &format!("{layer}self_attn."), &has),
            Mixer::Mla { indexer } => mla(&mut list, g, &format!("{layer}self_attn."), indexer, &has),
        }
        match spec.ffn {
            Ffn::Dense => mlp(&mut list, g.hidden, g.intermediate, &format!("{layer}mlp.")),
            Ffn::Moe => moe(&mut list, g, &format!("{layer}mlp."), &has),
        }
    }
    list.0
}

struct List(Vec<Need>);

impl List {
    /// A vector or another small tensor.
    fn add(&mut self, name: impl Into<String>, shape: &[usize]) {
        self.0.push(Need { name: name.into(), shape: shape.to_vec(), keeps_f32: false, routed: false, matrix: false });
    }

    fn add_f32(&mut self, name: String, shape: &[usize]) {
        self.0.push(Need { name, shape: shape.to_vec(), keeps_f32: true, routed: false, matrix: false });
    }

    fn add_matrix(&mut self, name: impl Into<String>, shape: &[usize]) {
        self.0.push(Need { name: name.into(), shape: shape.to_vec(), keeps_f32: false, routed: false, matrix: true });
    }

    fn add_routed(&mut self, name: String, shape: &[usize]) {
        self.0.push(Need { name, shape: shape.to_vec(), keeps_f32: false, routed: true, matrix: true });
    }
}

fn kda(list: &mut List, g: &Geometry, pre: &str, has: &impl Fn(&str) -> bool) {
    let (d, hd, width) = (g.hidden, g.kda_head_dim, g.kda_width());
    for x in ["q", "k", "v"] {
        list.add_matrix(format!("{pre}{x}_proj.weight"), &[width, d]);
    }
    if has(&format!("{pre}conv1d.weight")) {
        list.add(format!("{pre}conv1d.weight"), &[3 * width, 1, g.conv]);
    } else {
        for x in ["q", "k", "v"] {
            list.add(format!("{pre}{x}_conv1d.weight"), &[width, 1, g.conv]);
        }
    }
    for x in ["f", "g"] {
        list.add_matrix(format!("{pre}{x}_a_proj.weight"), &[hd, d]);
        list.add_matrix(format!("{pre}{x}_b_proj.weight"), &[width, hd]);
    }
    list.add_matrix(format!("{pre}b_proj.weight"), &[g.kda_heads, d]);
    let neg_exp = format!("{pre}A_log.{NEG_EXP}");
    list.add_f32(if has(&neg_exp) { neg_exp } else { format!("{pre}A_log") }, &[g.kda_heads]);
    list.add_f32(format!("{pre}dt_bias"), &[width]);
    list.add(format!("{pre}o_norm.weight"), &[hd]);
    list.add_matrix(format!("{pre}o_proj.weight"), &[d, width]);
}

fn mla(list: &mut List, g: &Geometry, pre: &str, indexer: Indexer, has: &impl Fn(&str) -> bool) {
    let (d, h) = (g.hidden, g.attn_heads);
    list.add_matrix(format!("{pre}q_a_proj.weight"), &[g.q_lora, d]);
    list.add(format!("{pre}q_a_layernorm.weight"), &[g.q_lora]);
    list.add_matrix(format!("{pre}q_b_proj.weight"), &[h * g.qk_dim, g.q_lora]);
    list.add_matrix(format!("{pre}kv_a_proj_with_mqa.weight"), &[g.kv_lora, d]);
    list.add(format!("{pre}kv_a_layernorm.weight"), &[g.kv_lora]);
    let (key_up, value_up) = (format!("{pre}kv_b_proj.weight.{KEY_UP}"), format!("{pre}kv_b_proj.weight.{VALUE_UP}"));
    if has(&key_up) {
        list.add_matrix(key_up, &[h, g.kv_lora, g.qk_dim]);
        list.add_matrix(value_up, &[h, g.v_dim, g.kv_lora]);
    } else {
        list.add_matrix(format!("{pre}kv_b_proj.weight"), &[h * (g.qk_dim + g.v_dim), g.kv_lora]);
    }
    list.add_matrix(format!("{pre}o_proj.weight"), &[d, h * g.v_dim]);
    if indexer == Indexer::Full {
        list.add_matrix(format!("{pre}indexer.wq_b.weight"), &[g.index_heads * g.index_dim, g.q_lora]);
        list.add_matrix(format!("{pre}indexer.wk.weight"), &[g.index_dim, d]);
        list.add(format!("{pre}indexer.k_norm.weight"), &[g.index_dim]);
        list.add(format!("{pre}indexer.k_norm.bias"), &[g.index_dim]);
        list.add_matrix(format!("{pre}indexer.weights_proj.weight"), &[g.index_heads, d]);
        list.add(format!("{pre}indexer.index_kpool_compress_ape"), &[g.kpool, g.index_dim]);
        list.add_matrix(format!("{pre}indexer.index_kpool_compress_gate"), &[g.index_dim, d]);
    }
}

fn mlp(list: &mut List, d: usize, inter: usize, pre: &str) {
    list.add_matrix(format!("{pre}gate_proj.weight"), &[inter, d]);
    list.add_matrix(format!("{pre}up_proj.weight"), &[inter, d]);
    list.add_matrix(format!("{pre}down_proj.weight"), &[d, inter]);
}

fn moe(list: &mut List, g: &Geometry, pre: &str, has: &impl Fn(&str) -> bool) {
    let (d, inter) = (g.hidden, g.moe_intermediate);
    list.add_matrix(format!("{pre}gate.weight"), &[g.experts, d]);
    list.add_f32(format!("{pre}gate.e_score_correction_bias"), &[g.experts]);
    mlp(list, d, g.shared_intermediate(), &format!("{pre}shared_experts."));
    if has(&format!("{pre}experts.gate_up_proj")) {
        list.add_routed(format!("{pre}experts.gate_up_proj"), &[g.experts, 2 * inter, d]);
        list.add_routed(format!("{pre}experts.down_proj"), &[g.experts, d, inter]);
        return;
    }
    if has(&format!("{pre}experts.gate_proj")) {
        list.add_routed(format!("{pre}experts.gate_proj"), &[g.experts, inter, d]);
        list.add_routed(format!("{pre}experts.up_proj"), &[g.experts, inter, d]);
        list.add_routed(format!("{pre}experts.down_proj"), &[g.experts, d, inter]);
        return;
    }
    for e in 0..g.experts {
        list.add_routed(format!("{pre}experts.{e}.gate_proj.weight"), &[inter, d]);
        // The first expert that is not there ends the list: it will be named, and a config that counts experts by the million costs nothing.
        if !has(&format!("{pre}experts.{e}.gate_proj.weight")) && !has(&format!("{pre}experts.{e}.gate_proj.weight_packed")) {
            return;
        }
        list.add_routed(format!("{pre}experts.{e}.up_proj.weight"), &[inter, d]);
        list.add_routed(format!("{pre}experts.{e}.down_proj.weight"), &[d, inter]);
    }
}
