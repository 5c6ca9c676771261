//! Logs: `tracing` events to stderr, one line each, as text or JSON, with the process's role and the request id of the span an
//! event lies in. Standard output stays free for machine-readable lines. Prompt and answer text is never logged.

use std::{fmt, io, io::IsTerminal as _};

use serde_json::{Map, Value};
use tracing::{Event, Subscriber, field::Field};
use tracing_subscriber::{
    EnvFilter,
    fmt::{
        FmtContext, FormatEvent, FormatFields, FormattedFields,
        format::{DefaultFields, JsonFields, Writer},
        time::{FormatTime, SystemTime},
    },
    registry::LookupSpan,
};

/// What is logged where nothing else is said: our own events at info, chatty network crates only when something is wrong.
pub const DEFAULT_FILTER: &str = "info,h2=warn,hyper=warn,hyper_util=warn,tonic=warn,tower=warn,reqwest=warn";

/// Shape of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// `TIME LEVEL role target: message key=value`.
    Text,
    /// One JSON object per line.
    Json,
}

/// Logging could not start.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The filter does not parse.
    #[error("log filter {filter:?}: {reason}; write it as level or target=level, comma-separated, e.g. info,tandem_proto=debug")]
    Filter {
        /// The filter as given.
        filter: String,
        /// The parser's own words.
        reason: String,
    },
    /// Another subscriber is installed.
    #[error("logging was started twice")]
    Twice,
}

/// Starts logging for this process. `role` is a short name such as `serve` or `experts-0`; `filter` overrides
/// [`DEFAULT_FILTER`] (the binary fills it from `--log` / `TANDEM_LOG`).
///
/// # Errors
/// When `filter` does not parse, or logging runs already.
pub fn init(role: &str, format: LogFormat, filter: Option<&str>) -> Result<(), LogError> {
    let filter = filter.unwrap_or(DEFAULT_FILTER);
    let parsed = EnvFilter::try_new(filter).map_err(|error| LogError::Filter { filter: filter.into(), reason: error.to_string() })?;
    let line = Line { role: role.into() };
    let builder =
        tracing_subscriber::fmt().with_env_filter(parsed).with_writer(|| Unfailing(io::stderr())).with_ansi(io::stderr().is_terminal());
    let result = match format {
        LogFormat::Text => builder.fmt_fields(DefaultFields::new()).event_format(TextLine(line)).try_init(),
        LogFormat::Json => builder.fmt_fields(JsonFields::new()).event_format(JsonLine(line)).try_init(),
    };
    result.map_err(|_| LogError::Twice)
}

/// Standard error that takes everything. When its reader is gone (a supervisor that was killed), the subscriber would report the
/// failed write on the same stream, and panic in whichever thread logs.
struct Unfailing(io::Stderr);

impl io::Write for Unfailing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = self.0.write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let _ = self.0.flush();
        Ok(())
    }
}

struct Line {
    role: String,
}

struct TextLine(Line);

impl<S, N> FormatEvent<S, N> for TextLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let meta = event.metadata();
        SystemTime.format_time(&mut out)?;
        write!(out, " {:>5} {} {}: ", meta.level().as_str(), self.0.role, meta.target())?;
        context.field_format().format_fields(out.by_ref(), event)?;
        for span in context.event_scope().into_iter().flatten() {
            let extensions = span.extensions();
            if let Some(fields) = extensions.get::<FormattedFields<N>>()
                && !fields.is_empty()
            {
                write!(out, " {fields}")?;
            }
        }
        writeln!(out)
    }
}

struct JsonLine(Line);

impl<S, N> FormatEvent<S, N> for JsonLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let meta = event.metadata();
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let mut object = Map::new();
        object.insert("timestamp".into(), time.into());
        object.insert("level".into(), meta.level().as_str().into());
        object.insert("role".into(), self.0.role.as_str().into());
        object.insert("target".into(), meta.target().into());
        // Outer spans first, so that an inner span's field of the same name wins, and the event's own over both.
        for span in context.event_scope().into_iter().flat_map(tracing_subscriber::registry::Scope::from_root) {
            let extensions = span.extensions();
            if let Some(fields) = extensions.get::<FormattedFields<N>>()
                && let Ok(Value::Object(fields)) = serde_json::from_str::<Value>(fields)
            {
                object.extend(fields);
            }
        }
        event.record(&mut Collect(&mut object));
        let text = serde_json::to_string(&object).map_err(|_| fmt::Error)?;
        writeln!(out, "{text}")
    }
}

/// Collects an event's fields into a JSON object.
struct Collect<'a>(&'a mut Map<String, Value>);

impl tracing::field::Visit for Collect<'_> {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name().into(), value.into());
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().into(), value.into());
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().into(), value.into());
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().into(), value.into());
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().into(), value.into());
    }
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().into(), format!("{value:?}").into());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tracing_subscriber::fmt::MakeWriter;

    use super::*;

    #[derive(Clone, Default)]
    struct Captured(Arc<Mutex<Vec<u8>>>);
    impl io::Write for Captured {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    impl<'a> MakeWriter<'a> for Captured {
        type Writer = Self;
        fn make_writer(&'a self) -> Self {
            self.clone()
        }
    }

    fn emit() {
        let span = tracing::info_span!("request", request_id = "req-7");
        let _inside = span.enter();
        tracing::info!(tokens = 3, reason = "stop", "finished");
    }

    #[test]
    fn text_lines_carry_role_and_request_id() {
        let out = Captured::default();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(out.clone())
            .with_ansi(false)
            .event_format(TextLine(Line { role: "serve".into() }))
            .finish();
        tracing::subscriber::with_default(subscriber, emit);
        let text = String::from_utf8(out.0.lock().clone()).expect("utf-8");
        assert!(
            text.contains("INFO serve tandem_runtime::logs::tests: finished tokens=3 reason=\"stop\" request_id=\"req-7\"\n"),
            "{text}"
        );
    }

    #[test]
    fn json_lines_are_objects_with_typed_fields() {
        let out = Captured::default();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(out.clone())
            .fmt_fields(JsonFields::new())
            .event_format(JsonLine(Line { role: "attn".into() }))
            .finish();
        tracing::subscriber::with_default(subscriber, emit);
        let text = String::from_utf8(out.0.lock().clone()).expect("utf-8");
        let value: Value = serde_json::from_str(text.trim()).expect("one JSON object");
        assert_eq!(value["role"], "attn");
        assert_eq!(value["message"], "finished");
        assert_eq!(value["tokens"], 3);
        assert_eq!(value["request_id"], "req-7");
        assert_eq!(value["level"], "INFO");
    }

    #[test]
    fn a_bad_filter_is_named() {
        let error = init("serve", LogFormat::Text, Some("tandem=loud")).expect_err("no such level");
        assert!(error.to_string().contains("tandem=loud"), "{error}");
    }
}
