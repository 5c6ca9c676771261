//! What the HTTP side needs of the checkpoint and of the settings.

use std::sync::Arc;

use tandem_model::{Checkpoint, GenerationConfig};
use tandem_runtime::Health;

use crate::api::{ApiParts, Defaults, Model, Options, ReasoningFields, TextError};
use crate::config::Config;
use crate::engine::Engine;

/// The model as the API serves it, under `name`.
pub(crate) fn model(checkpoint: &Checkpoint, name: &str) -> Result<Model, TextError> {
    Model::of(checkpoint, vec![name.to_owned()], defaults(checkpoint.generation()))
}

fn defaults(generation: &GenerationConfig) -> Defaults {
    Defaults {
        temperature: generation.temperature,
        top_p: generation.top_p,
        top_k: generation.top_k,
        min_p: generation.min_p,
        repetition_penalty: generation.repetition_penalty,
    }
}

/// Everything that the routes need.
pub(crate) fn api(config: &Config, engine: Engine, model: Model, health: Health) -> ApiParts {
    let named = |field: &str| config.reasoning_fields.iter().any(|name| name == field);
    ApiParts {
        engine,
        model,
        options: Options {
            max_logprobs: config.max_logprobs,
            reasoning_fields: ReasoningFields { reasoning_content: named("reasoning_content"), reasoning: named("reasoning") },
            ..Options::default()
        },
        metrics: Some(Arc::new(tandem_runtime::metrics::render)),
        stuck: Some(Arc::new(move || {
            let report = health.report();
            if report.live { Vec::new() } else { report.reasons }
        })),
    }
}
