//! The metrics of links and hop: names, units and meaning. Both workers call [`describe`] once their recorder is installed.
//!
//! | name | kind | where | meaning |
//! |---|---|---|---|
//! | `tandem_expert_dispatch_seconds{phase,worker}` | histogram | attention | one submission by phase; the phases add up to its round trip |
//! | `tandem_hop_rows_total{worker}` | counter | attention | rows answered |
//! | `tandem_hop_retries_total{reason}` | counter | attention | submissions sent again: `link`, `route`, `timeout`, `error`, `invalid` |
//! | `tandem_hop_mixed_arithmetic_total` | counter | attention | submissions given to another arithmetic (`--allow-mixed-experts`) |
//! | `tandem_hop_stale_answers_total` | counter | attention | answers that no open submission waits for |
//! | `tandem_link_info{worker,link,reason}` | gauge | attention | 1 for the link that was chosen: `first` offered or `fallback` |
//! | `tandem_link_shared{worker}` | gauge | attention | 1 where rows go through memory that both see |
//! | `tandem_link_bytes_total{dir,link}` | counter | both | bytes `sent` and `received`, headers included |
//! | `tandem_expert_duplicate_dispatches_total` | counter | expert | pieces that arrived again and were not computed again |

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

/// The histogram that needs buckets of microseconds.
pub const DISPATCH_SECONDS: &str = "tandem_expert_dispatch_seconds";

/// Registers help texts and units; call once after the recorder is installed.
pub fn describe() {
    describe_histogram!(DISPATCH_SECONDS, Unit::Seconds, "Time of one dispatch to an expert worker by phase.");
    describe_counter!("tandem_hop_rows_total", "Rows that an expert worker computed for this attention worker.");
    describe_counter!("tandem_hop_retries_total", "Dispatches sent again by reason.");
    describe_counter!("tandem_hop_mixed_arithmetic_total", "Dispatches given to a worker of another arithmetic.");
    describe_counter!("tandem_hop_stale_answers_total", "Answers that no open dispatch waits for.");
    describe_gauge!("tandem_link_info", "Always 1; the link chosen for a worker and why are in the labels.");
    describe_gauge!("tandem_link_shared", "1 where rows go to a worker through memory that both see.");
    describe_counter!("tandem_link_bytes_total", Unit::Bytes, "Bytes of expert traffic by direction.");
    describe_counter!("tandem_expert_duplicate_dispatches_total", "Dispatch pieces that arrived again.");
}
