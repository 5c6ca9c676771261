//! A client of a running server, for `bench`, `chat` and `ctl`: where it is, the key, errors in one line. `sse.rs` reads streams.

pub mod sse;

use std::time::Duration;

use serde_json::Value;

use crate::{cli::ServerArgs, failure::Failure};

/// A server to talk to.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    base: String,
    key: Option<String>,
}

impl Client {
    /// Connects to nothing yet. `timeout` is for a whole answer; a stream that may take its time has none.
    ///
    /// # Errors
    /// The HTTP client cannot be made.
    pub fn new(server: &ServerArgs, timeout: Option<Duration>) -> Result<Self, Failure> {
        let mut builder = reqwest::Client::builder().tcp_nodelay(true).connect_timeout(Duration::from_secs(10)).no_proxy();
        if let Some(timeout) = timeout {
            builder = builder.timeout(timeout);
        }
        let http = builder.build().map_err(|error| Failure::internal(error.to_string()))?;
        Ok(Self { http, base: server.url.trim_end_matches('/').to_owned(), key: server.api_key.clone() })
    }

    /// The server's URL, without a slash at its end.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// A GET of JSON: status and body.
    ///
    /// # Errors
    /// Nobody answers, or not in JSON.
    pub async fn get(&self, path: &str) -> Result<(reqwest::StatusCode, Value), Failure> {
        let url = format!("{}{path}", self.base);
        let failed = |error: reqwest::Error| Failure::unavailable(format!("{url}: {}", chain(&error)));
        let response = self.with_key(self.http.get(&url)).send().await.map_err(failed)?;
        let status = response.status();
        let text = response.text().await.map_err(failed)?;
        let body = serde_json::from_str(&text)
            .map_err(|_| Failure::unavailable(format!("{url}: {status}, and the body is not JSON: {text:.200}")))?;
        Ok((status, body))
    }

    /// As [`Client::get`], where only success will do.
    ///
    /// # Errors
    /// As there, or the server's own error.
    pub async fn get_ok(&self, path: &str) -> Result<Value, Failure> {
        match self.get(path).await? {
            (status, body) if status.is_success() => Ok(body),
            (status, body) => Err(refusal(&format!("{}{path}", self.base), status, &body)),
        }
    }

    /// A POST whose answer comes as a stream of events.
    ///
    /// # Errors
    /// Nobody answers, or the server refuses.
    pub async fn post(&self, path: &str, body: &Value) -> Result<reqwest::Response, Failure> {
        let url = format!("{}{path}", self.base);
        let failed = |error: reqwest::Error| Failure::unavailable(format!("{url}: {}", chain(&error)));
        let response = self.with_key(self.http.post(&url).json(body)).send().await.map_err(failed)?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let text = response.text().await.unwrap_or_default();
        Err(refusal(&url, status, &serde_json::from_str(&text).unwrap_or(Value::String(text))))
    }

    /// The name that was given, or the first that the server lists.
    ///
    /// # Errors
    /// Nobody answers, or no model is listed.
    pub async fn model(&self, given: Option<&str>) -> Result<String, Failure> {
        if let Some(name) = given {
            return Ok(name.to_owned());
        }
        let list = self.get_ok("/v1/models").await?;
        let first = list["data"][0]["id"].as_str().map(str::to_owned);
        first.ok_or_else(|| Failure::unavailable(format!("{}/v1/models: the server lists no model: {list}", self.base)))
    }

    fn with_key(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }
}

/// The server's error as one line.
fn refusal(url: &str, status: reqwest::StatusCode, body: &Value) -> Failure {
    let message = body["error"]["message"].as_str().map_or_else(|| body.to_string(), str::to_owned);
    let hint = if status == reqwest::StatusCode::UNAUTHORIZED { " (give --api-key or set TANDEM_API_KEY)" } else { "" };
    Failure::unavailable(format!("{url}: {status}: {message}{hint}"))
}

/// An error with its causes: reqwest's own text leaves out why a connection failed.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
