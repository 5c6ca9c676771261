//! The vision tower of the release: 24 blocks, a merger. It is never served; stubs have it so that readers skip it.

/// Name and shape of every tensor of the tower.
pub(super) fn tensors() -> Vec<(String, Vec<usize>)> {
    const BLOCK: [(&str, &[usize]); 14] = [
        ("attn.qkv.weight", &[3072, 1024]),
        ("attn.qkv.bias", &[3072]),
        ("attn.proj.weight", &[1024, 1024]),
        ("attn.proj.bias", &[1024]),
        ("attn.q_norm.weight", &[64]),
        ("attn.k_norm.weight", &[64]),
        ("mlp.gate_proj.weight", &[4096, 1024]),
        ("mlp.gate_proj.bias", &[4096]),
        ("mlp.up_proj.weight", &[4096, 1024]),
        ("mlp.up_proj.bias", &[4096]),
        ("mlp.down_proj.weight", &[1024, 4096]),
        ("mlp.down_proj.bias", &[1024]),
        ("norm1.weight", &[1024]),
        ("norm2.weight", &[1024]),
    ];
    const TOP: [(&str, &[usize]); 11] = [
        ("patch_embed.proj.weight", &[1024, 3, 2, 14, 14]),
        ("patch_embed.proj.bias", &[1024]),
        ("post_layernorm.weight", &[1024]),
        ("downsample.weight", &[4096, 1024, 2, 2]),
        ("downsample.bias", &[4096]),
        ("merger.proj.weight", &[4096, 4096]),
        ("merger.gate_proj.weight", &[10_240, 4096]),
        ("merger.up_proj.weight", &[10_240, 4096]),
        ("merger.down_proj.weight", &[4096, 10_240]),
        ("merger.post_projection_norm.weight", &[4096]),
        ("merger.post_projection_norm.bias", &[4096]),
    ];
    let blocks = (0..24).flat_map(|b| BLOCK.map(|(name, shape)| (format!("model.visual.blocks.{b}.{name}"), shape.to_vec())));
    blocks.chain(TOP.map(|(name, shape)| (format!("model.visual.{name}"), shape.to_vec()))).collect()
}
