//! What `tandem check` says about one checkpoint. The fields are a format that scripts read: they keep their names.

use std::{collections::BTreeMap, path::Path};

use serde::Serialize;
use tandem_coordinator::text::{ChatTemplate, TemplateError, Tokenizer};
use tandem_kernels::{DeviceKind, has_kernels};
use tandem_model::{
    Checkpoint,
    census::Census,
    semantic::{KINDS, Semantic},
};

/// PASS or REFUSED, with the reason.
#[derive(Debug, Serialize)]
pub struct Verdict {
    /// The folder or file.
    pub path: String,
    /// `PASS` or `REFUSED`.
    pub verdict: &'static str,
    /// Why it is refused.
    pub reason: Option<String>,
    /// What is in it; nothing where its headers cannot be read.
    pub checkpoint: Option<Contents>,
    /// What the experts' values look like (`--semantic`).
    pub semantic: Option<Values>,
    /// The long form in Markdown, where it was asked for beside this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<String>,
}

/// A checkpoint's headers in numbers.
#[derive(Debug, Serialize)]
pub struct Contents {
    /// `safetensors` or `gguf`.
    pub format: &'static str,
    /// Headers without data.
    pub stub: bool,
    /// Weight files.
    pub files: usize,
    /// Stored tensors.
    pub tensors: usize,
    /// Bytes of the tensors that are used.
    pub bytes: u64,
    /// Trunk layers: all, KDA, MLA, with routed experts.
    pub layers: [usize; 4],
    /// Routed experts of a layer.
    pub experts: usize,
    /// Bytes by stored type.
    pub types: BTreeMap<&'static str, Counted>,
    /// Bytes by part of the model.
    pub parts: BTreeMap<&'static str, Counted>,
    /// Types of the routed experts, by layer.
    pub experts_by_layer: Vec<LayerTypes>,
    /// By device kind: the stored types that it has no kernel for, with the first tensor of each.
    pub without_kernel: BTreeMap<&'static str, BTreeMap<&'static str, String>>,
    /// Ids that the tokenizer knows.
    pub tokenizer_tokens: Option<usize>,
    /// Whether there is a chat template.
    pub chat_template: bool,
    /// Ids that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// Parts that are there and not served.
    pub skipped: Vec<String>,
    /// Tensors stored narrower than the release has them.
    pub narrowed: Vec<String>,
    /// All warnings of the loader and of this check.
    pub warnings: Vec<String>,
}

/// A number of tensors and their bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Counted {
    /// Tensors.
    pub tensors: usize,
    /// Bytes.
    pub bytes: u64,
}

/// How a layer's routed experts are stored.
#[derive(Debug, Serialize)]
pub struct LayerTypes {
    /// Layer.
    pub layer: usize,
    /// Type of gate_proj.
    pub gate: String,
    /// Type of up_proj.
    pub up: String,
    /// Type of down_proj.
    pub down: String,
    /// Bytes of all its experts.
    pub bytes: u64,
}

/// What `--semantic` saw.
#[derive(Debug, Serialize)]
pub struct Values {
    /// Experts looked at.
    pub experts: usize,
    /// Median RMS of the looked-at gate, up and down matrices.
    pub median_rms: BTreeMap<&'static str, f64>,
    /// Largest share of zeros of one matrix.
    pub most_zeros: f64,
    /// How columns fit their companions: correlation as decoded, by matrices.
    pub column_order: BTreeMap<&'static str, f64>,
    /// What cannot be right.
    pub problems: Vec<String>,
    /// What could not be judged.
    pub notes: Vec<String>,
}

impl Verdict {
    /// Looks at one checkpoint. It passes where devices of `kinds` have kernels for all of it.
    pub fn of(path: &Path, kinds: &[DeviceKind], semantic: bool) -> Self {
        let path_text = path.display().to_string();
        let mut verdict = Self { path: path_text, verdict: "PASS", reason: None, checkpoint: None, semantic: None, report: None };
        let checkpoint = match Checkpoint::open_headers(path) {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                verdict.refuse(error.to_string());
                return verdict;
            }
        };
        let mut contents = Contents::of(&checkpoint);
        for kind in kinds {
            if let Some((dtype, tensor)) = contents.without_kernel.get(kind.name()).and_then(BTreeMap::first_key_value) {
                verdict.refuse(format!("no {} kernel for {dtype} (tensor {tensor})", kind.name()));
            }
        }
        if let Err(reason) = contents.read_text(&checkpoint) {
            verdict.refuse(reason);
        }
        verdict.checkpoint = Some(contents);
        if semantic && verdict.reason.is_none() {
            verdict.look_at_values(&checkpoint);
        }
        verdict
    }

    /// The verdict on a place that could not be looked at.
    pub fn refused(path: &Path, reason: String) -> Self {
        let path = path.display().to_string();
        Self { path, verdict: "REFUSED", reason: Some(reason), checkpoint: None, semantic: None, report: None }
    }

    /// The reason behind the path: without that path again, and files beside or below it by their names alone.
    pub fn short_reason(&self) -> &str {
        let reason = self.reason.as_deref().unwrap_or_default();
        let after = |prefix: &str, joint: &str| reason.strip_prefix(prefix)?.strip_prefix(joint);
        let path = self.path.trim_end_matches('/');
        let beside = || path.rsplit_once('/').filter(|(folder, _)| !folder.is_empty()).and_then(|(folder, _)| after(folder, "/"));
        let below = || if path.is_empty() { None } else { after(path, "/") };
        after(&self.path, ": ").or_else(|| after(path, ": ")).or_else(below).or_else(beside).unwrap_or(reason)
    }

    /// Whether it is refused.
    pub fn is_refused(&self) -> bool {
        self.reason.is_some()
    }

    /// The first reason stays.
    fn refuse(&mut self, reason: String) {
        self.verdict = "REFUSED";
        self.reason.get_or_insert(reason);
    }

    fn look_at_values(&mut self, checkpoint: &Checkpoint) {
        let values = match Semantic::of(checkpoint) {
            Ok(semantic) => Values::of(semantic),
            Err(error) => return self.refuse(format!("--semantic: {error}")),
        };
        if let Some(first) = values.problems.first() {
            let more = values.problems.len() - 1;
            let more = if more > 0 { format!(" (and {more} more)") } else { String::new() };
            self.refuse(format!("--semantic: {first}{more}"));
        }
        self.semantic = Some(values);
    }
}

impl Contents {
    fn of(checkpoint: &Checkpoint) -> Self {
        let (census, g) = (Census::of(checkpoint), checkpoint.geometry());
        let counted = |count: &tandem_model::census::Count| Counted { tensors: count.tensors, bytes: count.bytes };
        let lacks = |kind: DeviceKind| {
            let types = census.matrices.iter().filter(|(dtype, _)| !has_kernels(kind, **dtype));
            (kind.name(), types.map(|(dtype, tensor)| (dtype.name(), tensor.clone())).collect())
        };
        let layer = |e: &tandem_model::census::LayerExperts| {
            let [gate, up, down] = e.types.clone();
            LayerTypes { layer: e.layer, gate, up, down, bytes: e.bytes }
        };
        Self {
            format: if checkpoint.gguf().is_some() { "gguf" } else { "safetensors" },
            stub: checkpoint.is_stub(),
            files: checkpoint.file_count(),
            tensors: checkpoint.tensor_count(),
            bytes: census.total(),
            layers: [g.layers, g.kda_layers().len(), g.mla_layers().len(), g.moe_layers().len()],
            experts: g.experts,
            types: census.types.iter().map(|(dtype, count)| (dtype.name(), counted(count))).collect(),
            parts: census.parts.iter().map(|(part, count)| (part.name(), counted(count))).collect(),
            experts_by_layer: census.experts.iter().map(layer).collect(),
            without_kernel: DeviceKind::ALL.map(lacks).into(),
            tokenizer_tokens: None,
            chat_template: false,
            eos_token_ids: checkpoint.generation().eos_token_ids.clone(),
            skipped: checkpoint.skipped().iter().map(ToString::to_string).collect(),
            narrowed: checkpoint.narrowed_tensors(),
            warnings: checkpoint.warnings().to_vec(),
        }
    }

    /// Tokenizer and template, as the coordinator reads them.
    fn read_text(&mut self, checkpoint: &Checkpoint) -> Result<(), String> {
        let tokenizer = Tokenizer::of(checkpoint).map_err(|error| error.to_string())?;
        let (known, vocab) = (tokenizer.len(), checkpoint.geometry().vocab);
        if known > vocab {
            return Err(format!(
                "the tokenizer has ids up to {}, but the model's vocabulary has {vocab}: another model's tokenizer?",
                known - 1
            ));
        }
        self.tokenizer_tokens = Some(known);
        if self.eos_token_ids.is_empty() {
            self.warnings.push("no token ends a sequence: answers stop at their length limit only".to_owned());
        }
        for id in self.eos_token_ids.iter().filter(|id| tokenizer.bytes(**id).is_empty()) {
            self.warnings.push(format!("the end token {id} is none of the tokenizer's {known} ids"));
        }
        match ChatTemplate::of(checkpoint) {
            Ok(template) => {
                self.chat_template = true;
                self.warnings.extend(left_out(&template));
            }
            // A base model: completions work.
            Err(error @ TemplateError::Absent) => self.warnings.push(error.to_string()),
            Err(error) => return Err(error.to_string()),
        }
        Ok(())
    }
}

/// What is wrong with the prompt of the simplest chat, as a note: a template may be made for other messages.
fn left_out(template: &ChatTemplate) -> Option<String> {
    const WORDS: &str = "a question of four words";
    let messages = serde_json::json!([{"role": "user", "content": WORDS}]);
    match template.render(&messages, None, true, &serde_json::Map::new()) {
        Ok(prompt) if prompt.contains(WORDS) => None,
        Ok(_) => Some("the chat template leaves out what a user says: chats will be answered at random".to_owned()),
        Err(error) => Some(format!("one user's message does not render: {error}")),
    }
}

impl Values {
    fn of(semantic: Semantic) -> Self {
        let median = |kind: usize| {
            let mut all: Vec<f64> = semantic.experts.iter().map(|e| e.stats[kind].rms).collect();
            all.sort_by(f64::total_cmp);
            all.get(all.len() / 2).copied().unwrap_or(0.0)
        };
        Self {
            experts: semantic.experts.len(),
            median_rms: KINDS.iter().enumerate().map(|(k, name)| (*name, median(k))).collect(),
            most_zeros: semantic.experts.iter().flat_map(|e| e.stats.iter().map(|s| s.zeros)).fold(0.0, f64::max),
            column_order: semantic.orders.iter().map(|o| (o.what, o.as_decoded)).collect(),
            problems: semantic.problems,
            notes: semantic.notes,
        }
    }
}
