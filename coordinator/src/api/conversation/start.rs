//! From checked settings and prompts to running sequences: the limits that depend on the prompt, the grammar's last check, then admission.

use std::sync::Arc;

use tandem_grammar::Grammar;

use crate::api::ApiError;
use crate::api::choice::{Choice, ChoiceOptions};
use crate::api::run::{Run, RunPrompt};
use crate::api::settings::Settings;
use crate::api::state::App;
use crate::engine::{GenerateRequest, Guide, ThoughtLimit};
use crate::text::AnswerFormat;
use crate::text::glm::CLOSE;

/// What a route adds to the settings.
pub struct Plan<'a> {
    /// The request's settings.
    pub settings: &'a Settings,
    /// The prompts, none empty.
    pub prompts: Vec<RunPrompt>,
    /// Name of the prompt's field, for errors.
    pub field: &'static str,
    /// How the answer is to be read; `None` = as it is.
    pub format: Option<AnswerFormat>,
    /// What the sampler is held to.
    pub guide: Option<Guide>,
    /// How long the thought may be that the prompt has opened.
    pub thought: Option<ThoughtLimit>,
    /// `X-Request-Id`.
    pub request_id: String,
}

/// A grammar, and the field that asked for it.
pub struct Asked {
    /// The grammar.
    pub grammar: Grammar,
    /// For errors.
    pub field: String,
}

/// Compiles a grammar, so that whatever cannot be enforced is refused now. `behind_reasoning`: it holds behind `</think>`, where the
/// reasoning that the prompt has opened ends.
pub async fn guide(app: &Arc<App>, asked: Asked, behind_reasoning: bool, settings: &Settings) -> Result<Guide, ApiError> {
    let Asked { grammar, field } = asked;
    if settings.ignore_eos || app.model.eos_ids.is_empty() {
        let message = format!("{field} and ignore_eos exclude each other: what is complete must be able to end");
        return Err(ApiError::invalid("ignore_eos", message));
    }
    let text = grammar.to_text();
    let (checker, source) = (Arc::clone(app), text.clone());
    // Up to a second of work for a large schema; never on the threads that carry streams.
    let checked = tokio::task::spawn_blocking(move || checker.vocabulary()?.check(&source).map_err(|e| e.to_string())).await;
    match checked {
        Ok(Ok(_)) => {}
        Ok(Err(why)) => return Err(ApiError::unsupported(field.clone(), format!("{field} cannot be enforced: {why}"))),
        Err(error) => return Err(ApiError::internal(format!("the grammar could not be checked: {error}"))),
    }
    Ok(Guide { grammar: text.into(), after: if behind_reasoning { CLOSE.into() } else { String::new() } })
}

/// Admits all sequences of a request, or none.
pub fn start(app: &App, plan: Plan<'_>) -> Result<Run, ApiError> {
    let Plan { settings, prompts, field, format, guide, thought, request_id } = plan;
    let limit = app.limits()?.longest();
    for prompt in &prompts {
        let length = prompt.ids.len() as u64;
        if length == 0 {
            return Err(ApiError::invalid(field, format!("{field} has no tokens; at least one is needed")));
        }
        if length >= limit {
            return Err(ApiError::prompt_too_long(field, length, limit));
        }
    }
    let sequences = prompts.len() as u64 * u64::from(settings.n);
    if sequences > u64::from(app.options.max_choices) {
        let message = format!(
            "{} prompts times n = {} are {sequences} sequences; at most {} are allowed",
            prompts.len(),
            settings.n,
            app.options.max_choices
        );
        return Err(ApiError::invalid("n", message));
    }
    let mut stop_ids = settings.stop_token_ids.clone();
    if !settings.ignore_eos {
        stop_ids.extend(&app.model.eos_ids);
    }
    stop_ids.sort_unstable();
    stop_ids.dedup();

    let mut requests = Vec::new();
    for prompt in &prompts {
        // What does not fit the context ends with `length`, as the field has it: `max_tokens` is a bound, not an order.
        let room = limit - prompt.ids.len() as u64;
        let max_tokens = settings.max_tokens.map_or(room, |most| most.min(room)).min(u64::from(u32::MAX)) as u32;
        requests.extend((0..settings.n).map(|choice| GenerateRequest {
            prompt_ids: prompt.ids.clone(),
            sampling: settings.sampling.clone(),
            choice,
            stop_ids: stop_ids.clone(),
            max_tokens,
            min_tokens: settings.min_tokens.min(max_tokens),
            logprobs: settings.logprobs,
            prompt_logprobs: settings.prompt_logprobs,
            guide: guide.clone(),
            thought: thought.clone(),
            deadline: None,
            request_id: request_id.clone(),
        }));
    }
    let choices = (0..requests.len()).map(|_| {
        Choice::new(ChoiceOptions {
            tokenizer: Arc::clone(&app.model.tokenizer),
            skip_special: settings.skip_special,
            stop: settings.stop.clone(),
            include_stop: settings.include_stop,
            min_tokens: settings.min_tokens,
            stop_token_ids: settings.stop_token_ids.clone(),
            format: format.clone(),
        })
    });
    let choices = choices.collect();
    let generations = app.engine.submit(requests)?;
    tracing::debug!(%request_id, sequences = generations.len(), prompts = prompts.len(), "request admitted");
    Ok(Run::new(generations, choices, prompts, settings.n as usize, request_id))
}
