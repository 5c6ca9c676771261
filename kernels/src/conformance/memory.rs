//! Buffers and refusals: what holds before any op runs.

use tandem_quant::MatrixSource;

use super::{
    noise::Noise,
    rig::{Rig, text},
};
use crate::{Backend, Elem};

/// Zeroed buffers, offsets both ways, and a stack of unequal parts that is refused by name.
///
/// # Errors
/// The first disagreement.
pub fn judge<B: Backend>(backend: &B, seed: u64) -> Result<(), String> {
    let mut n = Noise::new(seed);
    let rig = Rig(backend);
    let (before, len, behind) = (n.between(0, 40), n.between(1, 40), n.between(0, 40));
    let all = before + len + behind;
    let padded = |middle: &[f32]| [&vec![0.0; before], middle, &vec![0.0; behind]].concat();

    let values = n.values(len, 0.0, 1.0);
    let mut floats = backend.alloc("floats", Elem::F32, all).map_err(text)?;
    backend.upload(&values, &mut floats, before);
    let mut part = vec![0.0; len];
    backend.download(&floats, before, &mut part).map_err(text)?;
    if rig.read(&floats, all)? != padded(&values) || part != values {
        return Err(format!("{len} numbers written at {before} of {all} read back otherwise"));
    }

    let ids: Vec<i32> = (0..len).map(|_| n.between(0, 1 << 30) as i32 - (1 << 29)).collect();
    let mut buffer = backend.alloc("ids", Elem::I32, all).map_err(text)?;
    backend.upload_i32(&ids, &mut buffer, before);
    let mut part = vec![0; len];
    backend.download_i32(&buffer, before, &mut part).map_err(text)?;
    if rig.read_ids(&buffer, all)? != [vec![0; before], ids.clone(), vec![0; behind]].concat() || part != ids {
        return Err(format!("{len} ids written at {before} of {all} read back otherwise"));
    }

    let (mut some_ids, mut some) = (vec![0; n.between(1, all)], vec![0.0; n.between(1, all)]);
    backend.download_choice(&buffer, &floats, &mut some_ids, &mut some).map_err(text)?;
    if some_ids != rig.read_ids(&buffer, some_ids.len())? || some != rig.read(&floats, some.len())? {
        return Err(format!("{} ids and {} numbers read back together otherwise than alone", some_ids.len(), some.len()));
    }

    let matrix = |name: &str, cols: usize| MatrixSource::from_f32(name, 1, cols, &vec![1.0; cols]).map_err(|e| e.to_string());
    match backend.weight(&[matrix("first.weight", 4)?, matrix("second.weight", 5)?]) {
        Ok(_) => Err("parts of 4 and 5 columns were stacked".to_owned()),
        Err(e) if !e.to_string().contains("second.weight") => Err(format!("a refused part is not named: {e}")),
        Err(_) => backend.sync().map_err(text),
    }
}
