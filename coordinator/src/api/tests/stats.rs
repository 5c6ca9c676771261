//! `/v1/stats` and the status page.

use super::harness::*;

#[tokio::test]
async fn stats_tell_what_is_so_and_are_not_cached() {
    let (addr, worker) = server().await;
    let answer = get(addr, "/v1/stats").await;
    assert_eq!((answer.status, answer.header("cache-control")), (200, Some("no-store")));
    let stats = answer.json();
    assert_eq!((&stats["ready"], &stats["requests"]["running"]), (&true.into(), &0.into()));
    assert_eq!(stats["model"], get(addr, "/v1/models").await.json()["data"][0]["id"]);
    worker.set_reasons(vec!["no attention worker".into()]);
    let stats = get(addr, "/v1/stats").await.json();
    assert_eq!((&stats["ready"], &stats["reasons"][0]), (&false.into(), &"no attention worker".into()));
}

#[tokio::test]
async fn the_page_needs_nothing_from_elsewhere() {
    let (addr, _worker) = server().await;
    let answer = get(addr, "/").await;
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("text/html; charset=utf-8")));
    assert!(answer.header("content-security-policy").is_some_and(|policy| policy.contains("default-src 'none'")));
    for foreign in ["http://", "https://", "src=\"", "@import", "innerHTML"] {
        assert!(!answer.body.contains(foreign), "{foreign} in the page");
    }
}
