//! One conversation → one prompt, one form of answer, running sequences. Every face (chat, responses, messages) brings its request into
//! this shape, and nothing behind it knows which face it was.
//!
//! | file | idea |
//! |---|---|
//! | this file | [`Conversation`], its prompt, and its start |
//! | `messages` | messages in the template's form |
//! | `tools` | declared functions, and which of them may or must be called |
//! | `thinking` | the many ways to say how hard to think → the template's names |
//! | `form` | a form that the answer must have (`response_format` and its kin) |
//! | `grammar` | form and tools → the grammar that the sampler is held to |
//! | `start` | checked settings and prompts → running sequences |

pub mod form;
mod grammar;
pub mod messages;
pub mod start;
pub mod thinking;
pub mod tools;

use std::sync::Arc;

use serde_json::{Map, Value};

use crate::api::run::{Run, RunPrompt};
use crate::api::settings::Settings;
use crate::api::state::App;
use crate::api::{ApiError, body};
use crate::engine::ThoughtLimit;
use crate::text::glm::{CLOSE, prompt_opens_reasoning};
use crate::text::{AnswerFormat, ChatTemplate};
pub use form::Form;
pub use messages::Message;
pub use thinking::Thinking;
pub use tools::Tools;

/// What a face makes of its request.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    /// The messages, in chat completions' form.
    pub messages: Vec<Message>,
    /// Name of the messages' field, for errors.
    pub field: &'static str,
    /// Declared functions and their use.
    pub tools: Tools,
    /// How hard to think.
    pub thinking: Thinking,
    /// Further names for the template.
    pub kwargs: Map<String, Value>,
    /// The form that the answer must have.
    pub form: Option<Form>,
    /// End with the assistant's opening; the default unless the last message is continued.
    pub add_generation_prompt: Option<bool>,
    /// Leave the last message open.
    pub continue_final_message: bool,
}

/// Messages → prompt text.
pub fn render(app: &App, conversation: Conversation) -> Result<String, ApiError> {
    let field = conversation.field;
    let Some(template) = &app.model.template else {
        return Err(ApiError::unsupported(field, crate::text::TemplateError::Absent.to_string()));
    };
    let messages = messages::normalize(conversation.messages, field, template.reads_parts())?;
    let mut kwargs = conversation.kwargs;
    conversation.thinking.apply(&mut kwargs);
    let tools = conversation.tools.rendered();
    let open = conversation.continue_final_message;
    let opening = conversation.add_generation_prompt.unwrap_or(!open);
    if open && opening {
        let message = "continue_final_message and add_generation_prompt exclude each other";
        return Err(ApiError::invalid("continue_final_message", message));
    }
    let messages = Value::Array(messages);
    let mut prompt = template.render(&messages, tools.as_ref(), opening, &kwargs).map_err(|e| ApiError::invalid(field, e.to_string()))?;
    if open {
        return continued(prompt, &messages, template);
    }
    if conversation.thinking.is_off() && prompt_opens_reasoning(&prompt) {
        // The family's template always opens the thought: closed at once, it is the layout of a turn without one.
        prompt.push_str(CLOSE);
    }
    Ok(prompt)
}

/// Cuts a prompt behind the last message's own text, so that the model goes on writing it.
fn continued(mut prompt: String, messages: &Value, template: &ChatTemplate) -> Result<String, ApiError> {
    let refuse = |what: &str| ApiError::invalid("continue_final_message", format!("continue_final_message: {what}"));
    let last = messages.as_array().and_then(|m| m.last()).and_then(|m| m.get("content"));
    let text = last.and_then(Value::as_str).ok_or_else(|| refuse("the last message's content must be a string"))?;
    let found = prompt.rfind(text.trim()).ok_or_else(|| refuse(&format!("{template:?} does not show the last message's text")))?;
    // A template may strip the text's trailing white space: keep it where it does not.
    let end = if prompt[found..].starts_with(text.trim_start()) { text.trim_start().len() } else { text.trim().len() };
    prompt.truncate(found + end);
    Ok(prompt)
}

/// Starts the answer to a conversation whose request had `size` bytes: all its sequences, or none.
pub async fn begin(
    app: &Arc<App>,
    conversation: Conversation,
    settings: &Settings,
    size: usize,
    request_id: String,
) -> Result<Run, ApiError> {
    let field = conversation.field;
    let (tools, form, budget) = (conversation.tools.clone(), conversation.form.clone(), conversation.thinking.budget());
    let renderer = Arc::clone(app);
    let prompt = body::off_thread(size, move || render(&renderer, conversation)).await?;
    let opened = prompt_opens_reasoning(&prompt);
    let grammar = grammar::build(form.as_ref(), &tools)?;
    let guide = match grammar {
        Some(grammar) => Some(start::guide(app, grammar, opened, settings).await?),
        None => None,
    };
    let format = AnswerFormat {
        reasoning: opened,
        tools: Arc::new(tools.callable()),
        single_call: tools.single(),
        verbatim: form.is_some() && !tools.must_call(),
        // What is held to a grammar is held to it behind the reasoning alone.
        calls_in_reasoning: guide.is_none(),
    };
    let ids = app.encode_prompt(field, prompt.clone(), false).await?;
    let close = |tokens| Ok::<_, ApiError>(ThoughtLimit { tokens, close: app.close_of_thought()? });
    let thought = budget.filter(|_| opened).map(close).transpose()?;
    let prompts = vec![RunPrompt { ids, text: prompt }];
    start::start(app, start::Plan { settings, prompts, field, format: Some(format), guide, thought, request_id })
}
