//! `/openapi.json`: the description of the API, kept by hand beside the code; `tests/tests/api_clients.rs` validates it and asks whatever it
//! describes.

use axum::http::header;
use axum::response::{IntoResponse, Response};

/// The document.
pub async fn document() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], include_str!("openapi.json")).into_response()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    /// The document names the routes that there are, and the release.
    #[test]
    fn the_document_is_of_this_release() {
        let document: Value = serde_json::from_str(include_str!("openapi.json")).unwrap();
        assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
        let source = include_str!("mod.rs");
        for path in document["paths"].as_object().unwrap().keys() {
            let route = path.replace("/v1/models/{id}", "/v1/models/{*id}");
            assert!(source.contains(&format!("\"{route}\"")), "{path} is no route");
        }
        for line in source.lines().filter_map(|line| line.trim().strip_prefix(".route(\"")) {
            let route = line.split('"').next().unwrap().replace("{*id}", "{id}");
            assert!(document["paths"].get(&route).is_some(), "{route} is not described");
        }
    }
}
