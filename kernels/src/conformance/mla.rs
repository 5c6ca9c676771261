//! The MLA cases: attention over given rows, and the indexer's choice of rows.

use super::{
    noise::Noise,
    rig::{Rig, text},
    sequences::{Place, SequenceCase, put, scatter},
    tolerance::{ATTEND_TOL, SCORE_TIE_TOL, Tolerance},
};
use crate::{
    Backend, IndexKeyWeights, IndexerParams, KdaDims, MlaParams, StateSpec,
    reference::{indexer, linear::dot},
};
use tandem_quant::MatrixSource;

fn spec(kpool: usize, latent: usize, index_dim: usize, page_tokens: usize) -> StateSpec {
    let kda = KdaDims { heads: 1, head_dim: 2, conv: 2 };
    StateSpec { slots: 0, pages: 0, page_tokens, kda_layers: 1, mla_layers: 2, kda, latent, index_dim, kpool }
}

/// `mla_append` and `mla_attend` over random ascending selections.
#[derive(Clone, Debug)]
pub struct Attend {
    seed: u64,
    params: MlaParams,
    kv_b: MatrixSource,
    width: usize,
    page_tokens: usize,
}

impl Attend {
    /// Random sizes.
    ///
    /// # Errors
    /// Sizes that no matrix has.
    pub fn new(seed: u64) -> Result<Self, String> {
        let mut n = Noise::new(seed);
        let params = MlaParams { heads: n.between(1, 6), qk_dim: n.between(1, 40), v_dim: n.between(1, 40), latent: n.between(1, 70) };
        let width = n.between(1, 90);
        Self::sized(n.seed(), params, width)
    }

    /// Given sizes; rows attend to up to `width` tokens.
    ///
    /// # Errors
    /// Sizes that no matrix has.
    pub fn sized(seed: u64, params: MlaParams, width: usize) -> Result<Self, String> {
        let mut n = Noise::new(seed);
        let kv_b = n.matrix(params.heads * (params.qk_dim + params.v_dim), params.latent)?;
        Ok(Self { seed, params, kv_b, width, page_tokens: n.between(1, 64) })
    }

    /// Heads of a given kv_b, `qk_dim` wide in q and k.
    pub fn of(seed: u64, kv_b: MatrixSource, heads: usize, qk_dim: usize) -> Self {
        let mut n = Noise::new(seed);
        let params = MlaParams { heads, qk_dim, v_dim: kv_b.rows() / heads - qk_dim, latent: kv_b.cols() };
        Self { seed, params, kv_b, width: n.between(1, 90), page_tokens: n.between(1, 64) }
    }

    /// Ascending positions up to the row's own, −1 padded.
    fn selection(&self, place: &Place) -> Vec<i32> {
        let mut n = Noise::at(self.seed, &[place.content, place.pos, place.layer, 1]);
        let visible = place.pos + 1;
        let count = if visible <= self.width { visible } else { n.between(1, self.width) };
        let mut chosen: Vec<i32> = n.shuffled(visible).into_iter().take(count).map(|t| t as i32).collect();
        chosen.sort_unstable();
        chosen.resize(self.width, -1);
        chosen
    }
}

impl SequenceCase for Attend {
    const TOLERANCE: Tolerance = ATTEND_TOL;

    fn spec(&self) -> StateSpec {
        spec(1, self.params.latent, 2, self.page_tokens)
    }

    fn layers(&self) -> usize {
        2
    }

    fn width(&self) -> usize {
        self.params.heads * self.params.v_dim
    }

    fn step<B: Backend>(&self, rig: &Rig<'_, B>, batch: &B::Batch, places: &[Place], state: &mut B::State) -> Result<Vec<f32>, String> {
        let (mut c, mut q, mut selected) = (Vec::new(), Vec::new(), Vec::new());
        for place in places {
            let mut n = Noise::at(self.seed, &[place.content, place.pos, place.layer]);
            c.extend(n.values(self.params.latent, 0.0, 1.0));
            q.extend(n.values(self.params.heads * self.params.qk_dim, 0.0, 1.5));
            selected.extend(self.selection(place));
        }
        let (rows, layer) = (places.len(), places[0].layer);
        let kv_b = rig.0.weight(std::slice::from_ref(&self.kv_b)).map_err(text)?;
        let (c, q, selected) = (rig.floats(&c)?, rig.floats(&q)?, rig.ids(&selected)?);
        let mut out = rig.out(rows * SequenceCase::width(self))?;
        rig.0.mla_append(batch, layer, &c, state);
        rig.0.mla_attend(batch, layer, &q, &kv_b, &selected, self.width, &self.params, state, &mut out);
        rig.read(&out, rows * SequenceCase::width(self))
    }
}

/// How the index keys of a case are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Keys {
    /// All different: no ties but those of ReLU.
    Random,
    /// Every third pool is the same: exact ties.
    Repeating,
}

/// `index_append` and `index_select`.
#[derive(Clone, Debug)]
pub struct Select {
    seed: u64,
    params: IndexerParams,
    keys: Keys,
    norm_weight: Vec<f32>,
    norm_bias: Vec<f32>,
    ape: Vec<f32>,
    columns: [usize; 3],
    stride: usize,
}

/// What the indexer sees of one token.
struct Token {
    key: Vec<f32>,
    gate: Vec<f32>,
    weights: Vec<f32>,
    iq: Vec<f32>,
}

impl Select {
    /// Random sizes; pools of 1 to 4 tokens.
    pub fn new(seed: u64) -> Self {
        let mut n = Noise::new(seed);
        let (heads, dim, kpool) = (n.between(1, 6), n.pick(&[3, 8, 16, 20, 32]), n.between(1, 4));
        let params = IndexerParams { heads, dim, kpool, topk: kpool * n.between(1, 6), always_tail: n.between(0, 3) > 0 };
        Self::sized(n.seed(), params)
    }

    /// Given sizes.
    pub fn sized(seed: u64, params: IndexerParams) -> Self {
        let mut n = Noise::new(seed);
        let IndexerParams { heads, dim, kpool, .. } = params;
        let (columns, stride) = scatter(&mut n, 0, [heads, dim, dim]);
        Self {
            seed,
            params,
            keys: n.pick(&[Keys::Random, Keys::Repeating]),
            norm_weight: n.values(dim, 1.0, 0.3),
            norm_bias: n.values(dim, 0.0, 0.3),
            ape: n.values(kpool * dim, 0.0, 0.5),
            columns,
            stride,
        }
    }

    fn token(&self, place: &Place) -> Token {
        let pos = match self.keys {
            Keys::Random => place.pos,
            Keys::Repeating => place.pos % (3 * self.params.kpool),
        };
        let mut key = Noise::at(self.seed, &[place.content, pos, place.layer]);
        let mut query = Noise::at(self.seed, &[place.content, place.pos, place.layer, 1]);
        let IndexerParams { heads, dim, .. } = self.params;
        Token {
            key: key.values(dim, 0.2, 1.0),
            gate: key.values(dim, 0.0, 1.0),
            weights: query.values(heads, 0.3, 1.0),
            iq: query.values(heads * dim, 0.0, 1.0),
        }
    }

    /// The choice of one row, straight from the formulas in f64; `None` where rounding may change it.
    fn expected(&self, place: &Place) -> Option<Vec<usize>> {
        let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
        let IndexerParams { dim, kpool, topk, always_tail, .. } = self.params;
        let (weight, bias, ape) = (wide(&self.norm_weight), wide(&self.norm_bias), wide(&self.ape));
        let selection = indexer::Selection { kpool, topk, always_tail };
        if selection.takes_all(place.pos + 1) {
            return Some((0..=place.pos).collect());
        }
        let pooled: Vec<Vec<f64>> = (0..(place.pos + 1) / kpool)
            .map(|p| {
                let tokens: Vec<Token> = (p * kpool..(p + 1) * kpool).map(|pos| self.token(&Place { pos, ..*place })).collect();
                let keys: Vec<f64> = tokens.iter().flat_map(|t| indexer::key(&wide(&t.key), &weight, &bias)).collect();
                let gates: Vec<f64> = tokens.iter().flat_map(|t| wide(&t.gate)).collect();
                indexer::pooled_key(&keys, &gates, &ape, kpool)
            })
            .collect();
        let token = self.token(place);
        let (iq, weights) = (wide(&token.iq), wide(&token.weights));
        let scores: Vec<f64> = pooled.iter().map(|pk| indexer::pool_score(&iq, &weights, pk)).collect();

        // rounding may move a product over the edge of ReLU, or two scores past each other
        let length = |v: &[f64]| dot(v, v).sqrt();
        let slack = SCORE_TIE_TOL.relative;
        let edge = pooled.iter().any(|pk| iq.chunks(dim).any(|q| dot(q, pk).abs() <= slack * length(q) * length(pk)));
        let mut ranked = scores.clone();
        ranked.sort_by(|a, b| b.total_cmp(a));
        let largest = ranked.iter().fold(0.0f64, |m, s| m.max(s.abs()));
        let (last, next) = (ranked[topk / kpool - 1], ranked.get(topk / kpool));
        let near = next.is_some_and(|&next| last != next && last - next <= slack * largest);
        (!edge && !near).then(|| indexer::select(place.pos, &selection, |p| scores[p]))
    }
}

impl SequenceCase for Select {
    const TOLERANCE: Tolerance = SCORE_TIE_TOL;

    fn spec(&self) -> StateSpec {
        let kpool = self.params.kpool;
        spec(kpool, 3, self.params.dim, if self.seed & 1 == 0 { StateSpec::page_tokens_for(kpool) } else { 3 * kpool })
    }

    fn layers(&self) -> usize {
        2
    }

    fn width(&self) -> usize {
        self.params.width()
    }

    fn step<B: Backend>(&self, rig: &Rig<'_, B>, batch: &B::Batch, places: &[Place], state: &mut B::State) -> Result<Vec<f32>, String> {
        let [w0, key0, gate0] = self.columns;
        let (mut proj, mut iq) = (Vec::new(), Vec::new());
        for place in places {
            let token = self.token(place);
            let mut row = vec![f32::NAN; self.stride];
            put(&mut row, w0, &token.weights);
            put(&mut row, key0, &token.key);
            put(&mut row, gate0, &token.gate);
            proj.extend(row);
            iq.extend(token.iq);
        }
        let vector = |values: &[f32]| rig.0.vector("indexer", values).map_err(text);
        let w = IndexKeyWeights { norm_weight: vector(&self.norm_weight)?, norm_bias: vector(&self.norm_bias)?, ape: vector(&self.ape)? };
        let (rows, layer, width) = (places.len(), places[0].layer, self.params.width());
        let (proj, iq) = (rig.floats(&proj)?, rig.floats(&iq)?);
        let mut selected = rig.out_ids(rows * width)?;
        rig.0.index_append(batch, layer, &proj, self.stride, key0, gate0, &w, &self.params, state);
        rig.0.index_select(batch, layer, &iq, &proj, self.stride, w0, &self.params, state, &mut selected);
        Ok(rig.read_ids(&selected, rows * width)?.into_iter().map(|t| t as f32).collect())
    }

    fn agree(&self, content: usize, got: &[f32], _want: &[f32], _extra: f64) -> Result<(), String> {
        for (row, got) in got.chunks(self.params.width()).enumerate() {
            let place = Place { content, pos: row / 2, layer: row % 2 };
            let Some(want) = self.expected(&place) else { continue };
            let chosen: Vec<usize> = got.iter().take_while(|&&t| t >= 0.0).map(|&t| t as usize).collect();
            if chosen != want || got[chosen.len()..].iter().any(|&t| t != -1.0) {
                return Err(format!("{place:?} attends to {got:?}, oracle {want:?}"));
            }
        }
        Ok(())
    }
}
