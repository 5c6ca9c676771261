//! Writing a synthetic checkpoint: safetensors files in a stream, never more than a few hundred KiB in memory.
//!
//! The layout is that of the safetensors library (F32 before the narrower types, then by name; header padded to 8 bytes), so that files of
//! the reference presets are identical byte for byte.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::Path,
};

use half::{bf16, f16};
use serde_json::{Value, json};
use tandem_quant::DType;

use super::{
    Files, Naming, Options, TextConfig,
    recipe::{Group, Recipe, recipes},
};
use crate::{ModelError, storage};

/// Elements made at a time.
const CHUNK: usize = 1 << 16;

/// A tensor as it is stored: one recipe, or several one behind the other.
struct Stored<'a> {
    name: String,
    shape: Vec<usize>,
    dtype: DType,
    parts: Vec<&'a Recipe>,
}

impl Stored<'_> {
    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.block_bytes()
    }
}

pub(super) fn write(config: &TextConfig, options: &Options, dir: &Path) -> Result<(), ModelError> {
    let io_error = |path: &Path| {
        let path = path.to_owned();
        move |source| ModelError::Io { path, source }
    };
    fs::create_dir_all(dir).map_err(io_error(dir))?;
    let recipes = recipes(config, options.seed, options.vision);
    let files = into_files(&recipes, options);
    let names: Vec<String> = match files.len() {
        1 => vec![storage::safetensors::SINGLE.to_owned()],
        n => (1..=n).map(|i| format!("model-{i:05}-of-{n:05}.safetensors")).collect(),
    };
    let (mut weight_map, mut total) = (BTreeMap::new(), 0);
    for (name, tensors) in names.iter().zip(&files) {
        let path = dir.join(name);
        replace(&path, |out| write_file(out, tensors)).map_err(io_error(&path))?;
        for tensor in tensors {
            weight_map.insert(tensor.name.clone(), name.clone());
            total += tensor.bytes();
        }
    }
    let mut jsons = vec![("config.json", config.to_json(options.flat_config))];
    if names.len() > 1 {
        jsons.push((storage::safetensors::INDEX, json!({ "metadata": { "total_size": total }, "weight_map": weight_map })));
    }
    let pad = config.eos.first();
    jsons.push(("generation_config.json", json!({ "eos_token_id": config.eos, "pad_token_id": pad, "do_sample": false })));
    for (name, value) in jsons {
        let path = dir.join(name);
        replace(&path, |out| pretty(out, &value)).map_err(io_error(&path))?;
    }
    for source in &options.extra_files {
        let name = source.file_name().unwrap_or_default();
        fs::copy(source, dir.join(name)).map_err(io_error(source))?;
    }
    Ok(())
}

/// Writes beside the file and renames, so that nobody maps half a file.
fn replace(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let partial = path.with_extension(format!("partial-{}", std::process::id()));
    let mut out = BufWriter::with_capacity(1 << 18, File::create(&partial)?);
    write(&mut out)?;
    out.into_inner().map_err(io::IntoInnerError::into_error)?;
    fs::rename(&partial, path)
}

fn pretty(out: &mut impl Write, value: &Value) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    out.write_all(b"\n")
}

fn into_files<'a>(recipes: &'a [Recipe], options: &Options) -> Vec<Vec<Stored<'a>>> {
    let stored: Vec<(Group, Stored<'a>)> = match options.naming {
        Naming::Published | Naming::TextOnly => recipes.iter().map(|r| (r.group, single(r, options))).collect(),
        Naming::Transformers => fused(recipes, options),
    };
    let count = match options.files {
        Files::Single => 1,
        Files::ByGroup => 3,
        Files::Shards(n) => n.max(1),
    };
    let mut files: Vec<Vec<Stored<'a>>> = (0..count).map(|_| Vec::new()).collect();
    for (i, (group, tensor)) in stored.into_iter().enumerate() {
        let file = match options.files {
            Files::Single => 0,
            Files::ByGroup => group as usize,
            Files::Shards(_) => i % count,
        };
        files[file].push(tensor);
    }
    files.retain(|f| !f.is_empty());
    for file in &mut files {
        file.sort_by(|a, b| (a.dtype != DType::F32, &a.name).cmp(&(b.dtype != DType::F32, &b.name)));
    }
    files
}

fn dtype(recipe: &Recipe, options: &Options) -> DType {
    if recipe.keeps_f32 && !options.narrow { DType::F32 } else { options.floats }
}

fn single<'a>(recipe: &'a Recipe, options: &Options) -> Stored<'a> {
    let name = match options.naming {
        Naming::TextOnly => recipe.name.replacen("model.language_model.", "model.", 1),
        _ => recipe.name.clone(),
    };
    Stored { name, shape: recipe.shape.clone(), dtype: dtype(recipe, options), parts: vec![recipe] }
}

/// The names and the fused tensors of the `transformers` modules, which keep router and convolution in F32.
fn fused<'a>(recipes: &'a [Recipe], options: &Options) -> Vec<(Group, Stored<'a>)> {
    let mut list: Vec<(Group, Stored<'a>)> = Vec::new();
    for recipe in recipes {
        let name = &recipe.name;
        let mut tensor = single(recipe, options);
        let whole = if name.contains("_conv1d.weight") {
            let at = name.find("_conv1d").unwrap_or_default() - 1;
            Some(format!("{}conv1d.weight", &name[..at]))
        } else if let Some((pre, rest)) = name.split_once(".experts.") {
            let part = if rest.ends_with("down_proj.weight") { "down_proj" } else { "gate_up_proj" };
            Some(format!("{pre}.experts.{part}"))
        } else {
            None
        };
        if name.ends_with("mlp.gate.weight") || name.contains("conv1d") {
            tensor.dtype = DType::F32;
        }
        tensor.name = module_name(name);
        let Some(whole) = whole else {
            list.push((recipe.group, tensor));
            continue;
        };
        tensor.name = whole;
        match list.iter_mut().find(|(_, t)| t.name == tensor.name) {
            Some((_, first)) => first.parts.push(recipe),
            None => list.push((recipe.group, tensor)),
        }
    }
    for (group, tensor) in &mut list {
        let parts = tensor.parts.len();
        match (&*group, tensor.name.ends_with("gate_up_proj")) {
            (Group::Expert, true) => tensor.shape = vec![parts / 2, 2 * tensor.shape[0], tensor.shape[1]],
            (Group::Expert, false) => tensor.shape.insert(0, parts),
            _ => tensor.shape[0] *= parts,
        }
    }
    list
}

fn module_name(published: &str) -> String {
    for part in ["f_a_proj.weight", "f_b_proj.weight", "A_log", "dt_bias"] {
        if let Some(pre) = published.strip_suffix(part) {
            return format!("{pre}forget_gate.{part}");
        }
    }
    match published.rsplit_once("hc_") {
        Some((pre, site_part)) => match site_part.split_once('_') {
            Some((site, part)) => format!("{pre}{site}_hc.{part}"),
            None => published.to_owned(),
        },
        None => published.to_owned(),
    }
}

fn write_file(out: &mut impl Write, tensors: &[Stored<'_>]) -> io::Result<()> {
    let mut header = String::from("{\"__metadata__\":{\"format\":\"pt\"}");
    let mut at = 0;
    for t in tensors {
        let end = at + t.bytes();
        let shape = t.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        header += &format!(",\"{}\":{{\"dtype\":\"{}\",\"shape\":[{shape}],\"data_offsets\":[{at},{end}]}}", t.name, t.dtype);
        at = end;
    }
    header.push('}');
    let padded = header.len().next_multiple_of(8);
    header += &" ".repeat(padded - header.len());
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    let (mut values, mut bytes) = (Vec::with_capacity(CHUNK), Vec::with_capacity(4 * CHUNK));
    for tensor in tensors {
        for recipe in &tensor.parts {
            for start in (0..recipe.len()).step_by(CHUNK) {
                values.clear();
                bytes.clear();
                recipe.generate(start..(start + CHUNK).min(recipe.len()), &mut values);
                encode(tensor.dtype, &values, &mut bytes);
                out.write_all(&bytes)?;
            }
        }
    }
    Ok(())
}

/// f32 → stored elements, rounded to nearest even.
fn encode(dtype: DType, values: &[f32], out: &mut Vec<u8>) {
    match dtype {
        DType::Bf16 => out.extend(values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes())),
        DType::F16 => out.extend(values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes())),
        _ => out.extend(values.iter().flat_map(|v| v.to_le_bytes())),
    }
}
