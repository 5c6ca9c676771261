//! What the HTTP side needs of the checkpoint and of the settings.

use std::sync::Arc;

use axum::http::HeaderValue;
use tandem_model::{Checkpoint, GenerationConfig};
use tandem_runtime::Health;

use crate::api::{ApiParts, Defaults, Keys, Model, Options, ReasoningFields, TextError};
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
///
/// # Errors
/// A key or an origin that can be none, or a key file that cannot be read; the text names it.
pub(crate) fn api(config: &Config, engine: Engine, model: Model, health: Health) -> Result<ApiParts, String> {
    let named = |field: &str| config.reasoning_fields.iter().any(|name| name == field);
    let keys = Keys::new(&config.api_keys, config.api_key_file.clone()).map_err(|why| format!("--api-key, --api-key-file: {why}"))?;
    let origin = |text: &String| HeaderValue::from_str(text).map_err(|_| format!("--cors-origins: `{text}` is no origin"));
    Ok(ApiParts {
        engine,
        model,
        options: Options {
            max_logprobs: config.max_logprobs,
            reasoning_fields: ReasoningFields { reasoning_content: named("reasoning_content"), reasoning: named("reasoning") },
            keys: Arc::new(keys),
            cors_origins: config.cors_origins.iter().map(origin).collect::<Result<_, _>>()?,
            keep_alive: config.sse_keep_alive,
            body_limit: config.max_body_bytes,
            ..Options::default()
        },
        metrics: Some(Arc::new(tandem_runtime::metrics::render)),
        stuck: Some(Arc::new(move || {
            let report = health.report();
            if report.live { Vec::new() } else { report.reasons }
        })),
    })
}
