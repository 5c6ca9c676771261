//! What the reference backend keeps in "device memory": buffers, matrices, expert banks, sequence state.

use super::Real;
use crate::{BackendError, Elem, ExpertSource, StateSpec};
use tandem_quant::MatrixSource;

/// A buffer of numbers or ids.
#[derive(Clone, Debug)]
pub struct Buf<T> {
    pub(super) what: String,
    pub(super) data: Data<T>,
}

#[derive(Clone, Debug)]
pub(super) enum Data<T> {
    Real(Vec<T>),
    Ids(Vec<i32>),
}

impl<T: Real> Buf<T> {
    pub(super) fn zeroed(what: &str, elem: Elem, len: usize) -> Self {
        let data = match elem {
            Elem::F32 => Data::Real(vec![T::ZERO; len]),
            Elem::I32 => Data::Ids(vec![0; len]),
        };
        Self { what: what.to_owned(), data }
    }

    /// The first `n` numbers.
    pub(super) fn reals(&self, n: usize) -> Result<&[T], String> {
        match &self.data {
            Data::Real(v) => v.get(..n).ok_or_else(|| self.short(n, v.len())),
            Data::Ids(_) => Err(self.wrong("numbers", "ids")),
        }
    }

    pub(super) fn reals_mut(&mut self, n: usize) -> Result<&mut [T], String> {
        let error = match &self.data {
            Data::Real(v) if v.len() >= n => None,
            Data::Real(v) => Some(self.short(n, v.len())),
            Data::Ids(_) => Some(self.wrong("numbers", "ids")),
        };
        match (&mut self.data, error) {
            (Data::Real(v), None) => Ok(&mut v[..n]),
            (_, error) => Err(error.unwrap_or_default()),
        }
    }

    /// The first `n` ids.
    pub(super) fn ids(&self, n: usize) -> Result<&[i32], String> {
        match &self.data {
            Data::Ids(v) => v.get(..n).ok_or_else(|| self.short(n, v.len())),
            Data::Real(_) => Err(self.wrong("ids", "numbers")),
        }
    }

    pub(super) fn ids_mut(&mut self, n: usize) -> Result<&mut [i32], String> {
        let error = match &self.data {
            Data::Ids(v) if v.len() >= n => None,
            Data::Ids(v) => Some(self.short(n, v.len())),
            Data::Real(_) => Some(self.wrong("ids", "numbers")),
        };
        match (&mut self.data, error) {
            (Data::Ids(v), None) => Ok(&mut v[..n]),
            (_, error) => Err(error.unwrap_or_default()),
        }
    }

    /// Zeroes everything.
    pub(super) fn clear(&mut self) {
        match &mut self.data {
            Data::Real(v) => v.fill(T::ZERO),
            Data::Ids(v) => v.fill(0),
        }
    }

    /// Every number, for tests that want the oracle's full precision.
    pub fn values(&self) -> &[T] {
        match &self.data {
            Data::Real(v) => v,
            Data::Ids(_) => &[],
        }
    }

    fn short(&self, needed: usize, got: usize) -> String {
        format!("buffer {} holds {got} elements, but {needed} are needed", self.what)
    }

    fn wrong(&self, needed: &str, got: &str) -> String {
        format!("buffer {} holds {got}, but {needed} are needed", self.what)
    }
}

/// A matrix `[rows, cols]`, dequantised.
#[derive(Clone, Debug)]
pub struct Matrix<T> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) values: Vec<T>,
}

impl<T: Real> Matrix<T> {
    /// Stacks parts along rows.
    pub(super) fn stack(parts: &[MatrixSource]) -> Result<Self, BackendError> {
        let cols = parts.first().map_or(0, MatrixSource::cols);
        if let Some(odd) = parts.iter().find(|p| p.cols() != cols) {
            let reason = format!("it has {} columns, but {} has {cols}; stacked parts need equal columns", odd.cols(), parts[0].name());
            return Err(BackendError::Weight { tensor: odd.name().to_owned(), reason });
        }
        let values = parts.iter().flat_map(|p| p.to_f32()).map(T::of_f32).collect();
        Ok(Self { rows: parts.iter().map(MatrixSource::rows).sum(), cols, values })
    }
}

/// The experts of one layer of one shard.
#[derive(Clone, Debug)]
pub struct Bank<T> {
    pub(super) first: u32,
    pub(super) experts: Vec<[Matrix<T>; 3]>,
}

impl<T: Real> Bank<T> {
    pub(super) fn load(first: u32, sources: Vec<ExpertSource>) -> Result<Self, BackendError> {
        let mut experts = Vec::with_capacity(sources.len());
        for s in sources {
            if s.gate.rows() != s.up.rows()
                || s.gate.cols() != s.up.cols()
                || s.down.cols() != s.gate.rows()
                || s.down.rows() != s.gate.cols()
            {
                let shape = |m: &MatrixSource| format!("[{}, {}]", m.rows(), m.cols());
                let reason = format!(
                    "gate {}, up {} and down {} do not fit together; needed are [I, D], [I, D] and [D, I]",
                    shape(&s.gate),
                    shape(&s.up),
                    shape(&s.down)
                );
                return Err(BackendError::Weight { tensor: s.gate.name().to_owned(), reason });
            }
            experts.push([Matrix::stack(&[s.gate])?, Matrix::stack(&[s.up])?, Matrix::stack(&[s.down])?]);
        }
        Ok(Self { first, experts })
    }

    /// The expert with a global id, where it is held.
    pub(super) fn get(&self, id: i32) -> Option<&[Matrix<T>; 3]> {
        let index = u32::try_from(id).ok()?.checked_sub(self.first)?;
        self.experts.get(index as usize)
    }
}

/// All sequence state. Slots: KDA state, convolution taps, raw index keys with their gates. Pages: latent rows, pooled index keys.
#[derive(Clone, Debug)]
pub struct State<T> {
    pub(super) spec: StateSpec,
    /// Pools indexed by slot, then the same indexed by page.
    kda: Pool<T>,
    conv: Pool<T>,
    raw: Pool<T>,
    latent: Pool<T>,
    pooled: Pool<T>,
}

/// `[units][layers][size]` numbers; a unit is a slot or a page.
#[derive(Clone, Debug)]
struct Pool<T> {
    layers: usize,
    size: usize,
    values: Vec<T>,
}

impl<T: Real> Pool<T> {
    fn new(units: usize, layers: usize, size: usize) -> Self {
        Self { layers, size, values: vec![T::ZERO; units * layers * size] }
    }

    fn unit(&self, unit: usize) -> Result<&[T], String> {
        let len = self.layers * self.size;
        self.values.get(unit * len..(unit + 1) * len).ok_or_else(|| format!("no slot or page {unit} in the pool"))
    }

    fn unit_mut(&mut self, unit: usize) -> Result<&mut [T], String> {
        let len = self.layers * self.size;
        self.values.get_mut(unit * len..(unit + 1) * len).ok_or_else(|| format!("no slot or page {unit} in the pool"))
    }

    fn of(&self, unit: usize, layer: usize) -> Result<&[T], String> {
        let size = self.size;
        self.unit(unit)?.get(layer * size..(layer + 1) * size).ok_or_else(|| format!("no layer {layer} in the state"))
    }

    fn of_mut(&mut self, unit: usize, layer: usize) -> Result<&mut [T], String> {
        let size = self.size;
        self.unit_mut(unit)?.get_mut(layer * size..(layer + 1) * size).ok_or_else(|| format!("no layer {layer} in the state"))
    }

    fn copy(&mut self, from: usize, to: usize) -> Result<(), String> {
        let source = self.unit(from)?.to_vec();
        self.unit_mut(to)?.copy_from_slice(&source);
        Ok(())
    }
}

impl<T: Real> State<T> {
    pub(super) fn new(spec: &StateSpec) -> Result<Self, String> {
        let kpool = spec.kpool.max(1);
        if spec.page_tokens == 0 || !spec.page_tokens.is_multiple_of(kpool) {
            return Err(format!("pages of {} tokens are no whole number of pools of {} tokens", spec.page_tokens, spec.kpool));
        }
        let (h, d, taps) = (spec.kda.heads, spec.kda.head_dim, spec.kda.conv);
        Ok(Self {
            spec: spec.clone(),
            kda: Pool::new(spec.slots, spec.kda_layers, h * d * d),
            conv: Pool::new(spec.slots, spec.kda_layers, taps.saturating_sub(1) * 3 * h * d),
            raw: Pool::new(spec.slots, spec.mla_layers, spec.kpool * 2 * spec.index_dim),
            latent: Pool::new(spec.pages, spec.mla_layers, spec.page_tokens * spec.latent),
            pooled: Pool::new(spec.pages, spec.mla_layers, spec.page_tokens / kpool * spec.index_dim),
        })
    }

    /// `[H, Dh, Dh]` state and `[conv − 1, 3·H·Dh]` taps of a KDA layer.
    pub(super) fn kda_mut(&mut self, slot: usize, layer: usize) -> Result<(&mut [T], &mut [T]), String> {
        Ok((self.kda.of_mut(slot, layer)?, self.conv.of_mut(slot, layer)?))
    }

    /// Raw keys `[kpool, dim]` and gates `[kpool, dim]` of the pool that is being filled.
    pub(super) fn raw_mut(&mut self, slot: usize, layer: usize) -> Result<(&mut [T], &mut [T]), String> {
        let half = self.spec.kpool * self.spec.index_dim;
        Ok(self.raw.of_mut(slot, layer)?.split_at_mut(half))
    }

    /// The latent row of a token: `index` counts inside the page.
    pub(super) fn latent(&self, page: usize, layer: usize, index: usize) -> Result<&[T], String> {
        let n = self.spec.latent;
        Ok(&self.latent.of(page, layer)?[index * n..(index + 1) * n])
    }

    pub(super) fn latent_mut(&mut self, page: usize, layer: usize, index: usize) -> Result<&mut [T], String> {
        let n = self.spec.latent;
        Ok(&mut self.latent.of_mut(page, layer)?[index * n..(index + 1) * n])
    }

    /// The key of a pool: `index` counts inside the page.
    pub(super) fn pooled(&self, page: usize, layer: usize, index: usize) -> Result<&[T], String> {
        let n = self.spec.index_dim;
        Ok(&self.pooled.of(page, layer)?[index * n..(index + 1) * n])
    }

    pub(super) fn pooled_mut(&mut self, page: usize, layer: usize, index: usize) -> Result<&mut [T], String> {
        let n = self.spec.index_dim;
        Ok(&mut self.pooled.of_mut(page, layer)?[index * n..(index + 1) * n])
    }

    pub(super) fn reset(&mut self, slot: usize) -> Result<(), String> {
        [&mut self.kda, &mut self.conv, &mut self.raw].into_iter().try_for_each(|p| p.unit_mut(slot).map(|v| v.fill(T::ZERO)))
    }

    pub(super) fn copy_slot(&mut self, from: usize, to: usize) -> Result<(), String> {
        [&mut self.kda, &mut self.conv, &mut self.raw].into_iter().try_for_each(|p| p.copy(from, to))
    }

    pub(super) fn copy_page(&mut self, from: usize, to: usize) -> Result<(), String> {
        [&mut self.latent, &mut self.pooled].into_iter().try_for_each(|p| p.copy(from, to))
    }

    /// A slot and its pages as bytes: all numbers in pool order.
    pub(super) fn export(&self, slot: usize, pages: &[u32]) -> Result<Vec<u8>, String> {
        let mut out = Vec::new();
        let mut put = |values: &[T]| values.iter().for_each(|v| v.write_le(&mut out));
        for pool in [&self.kda, &self.conv, &self.raw] {
            put(pool.unit(slot)?);
        }
        for &page in pages {
            for pool in [&self.latent, &self.pooled] {
                put(pool.unit(page as usize)?);
            }
        }
        Ok(out)
    }

    /// Reads what [`State::export`] wrote.
    pub(super) fn import(&mut self, slot: usize, pages: &[u32], snapshot: &[u8]) -> Result<(), String> {
        let per_slot = [&self.kda, &self.conv, &self.raw].map(|p| p.layers * p.size).iter().sum::<usize>();
        let per_page = [&self.latent, &self.pooled].map(|p| p.layers * p.size).iter().sum::<usize>();
        let needed = (per_slot + pages.len() * per_page) * T::BYTES;
        if snapshot.len() != needed {
            return Err(format!("a snapshot of {} pages has {needed} bytes here, but {} were given", pages.len(), snapshot.len()));
        }
        let mut values = snapshot.chunks_exact(T::BYTES).filter_map(T::read_le);
        let mut fill = |to: &mut [T]| to.iter_mut().zip(&mut values).for_each(|(t, v)| *t = v);
        for pool in [&mut self.kda, &mut self.conv, &mut self.raw] {
            fill(pool.unit_mut(slot)?);
        }
        for &page in pages {
            for pool in [&mut self.latent, &mut self.pooled] {
                fill(pool.unit_mut(page as usize)?);
            }
        }
        Ok(())
    }
}
