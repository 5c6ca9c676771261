//! Names, help texts and buckets.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
use tandem_runtime::metrics::{Buckets, COUNTS, E2E, ITL, TTFT};

/// Every histogram of the coordinator with its buckets, for `tandem_runtime::metrics::install`.
pub fn buckets() -> &'static [Buckets] {
    const fn of(name: &'static str, bounds: &'static [f64]) -> Buckets {
        Buckets { name, bounds }
    }
    const ALL: &[Buckets] = &[
        of("tandem_time_to_first_token_seconds", TTFT),
        of("tandem_inter_token_latency_seconds", ITL),
        of("tandem_request_duration_seconds", E2E),
        of("tandem_request_queue_seconds", E2E),
        of("tandem_request_prefill_seconds", E2E),
        of("tandem_request_decode_seconds", E2E),
        of("tandem_request_prompt_tokens", COUNTS),
        of("tandem_request_generation_tokens", COUNTS),
        of("tandem_iteration_tokens", COUNTS),
        of("vllm:iteration_tokens_total", COUNTS),
        of("vllm:time_to_first_token_seconds", TTFT),
        of("vllm:inter_token_latency_seconds", ITL),
        of("vllm:time_per_output_token_seconds", ITL),
        of("vllm:request_time_per_output_token_seconds", ITL),
        of("vllm:e2e_request_latency_seconds", E2E),
        of("vllm:request_queue_time_seconds", E2E),
        of("vllm:request_inference_time_seconds", E2E),
        of("vllm:request_prefill_time_seconds", E2E),
        of("vllm:request_decode_time_seconds", E2E),
        of("vllm:request_prompt_tokens", COUNTS),
        of("vllm:request_generation_tokens", COUNTS),
        of("vllm:request_params_max_tokens", COUNTS),
        of("vllm:request_params_n", COUNTS),
    ];
    ALL
}

/// Registers the help texts of all metrics of the coordinator; those of the aliases only if `vllm`.
pub fn describe(vllm: bool) {
    describe_gauge!("tandem_requests_running", Unit::Count, "Requests in an attention worker's batch.");
    describe_gauge!("tandem_requests_waiting", Unit::Count, "Requests that wait for a place in a batch.");
    describe_gauge!("tandem_kv_cache_usage_ratio", Unit::Percent, "Used share of the attention workers' latent pools, 0 to 1.");
    describe_gauge!("tandem_ready", Unit::Count, "1 when a token can be made now.");
    describe_counter!("tandem_prompt_tokens_total", Unit::Count, "Prompt tokens prefilled, without those of resumed requests.");
    describe_counter!("tandem_generation_tokens_total", Unit::Count, "Tokens generated, without those past a stop string.");
    describe_counter!("tandem_preemptions_total", Unit::Count, "Requests that a worker took out of its batch for a while.");
    describe_counter!("tandem_prefix_cache_queries_total", Unit::Count, "Prompt tokens that a worker's prefix cache was asked for.");
    describe_counter!("tandem_prefix_cache_hits_total", Unit::Count, "Prompt tokens whose state came from a worker's prefix cache.");
    describe_counter!(
        "tandem_request_resumes_total",
        Unit::Count,
        "Requests submitted again from their journal after the loss of a worker."
    );
    describe_counter!("tandem_requests_finished_total", Unit::Count, "Requests that ended, by reason: stop, length, abort, error.");
    describe_counter!("tandem_admission_rejections_total", Unit::Count, "API requests that were not admitted, by reason.");
    describe_counter!("tandem_http_responses_total", Unit::Count, "HTTP answers by route, method and status.");
    describe_counter!("tandem_http_client_disconnects_total", Unit::Count, "Clients that went away before their answer was complete.");
    describe_histogram!("tandem_time_to_first_token_seconds", Unit::Seconds, "From admission to the first token.");
    describe_histogram!("tandem_inter_token_latency_seconds", Unit::Seconds, "From one token of a request to the next.");
    describe_histogram!("tandem_request_duration_seconds", Unit::Seconds, "From admission to the end.");
    describe_histogram!("tandem_request_queue_seconds", Unit::Seconds, "From admission to the beginning of prefill.");
    describe_histogram!("tandem_request_prefill_seconds", Unit::Seconds, "From the beginning of prefill to the first token.");
    describe_histogram!("tandem_request_decode_seconds", Unit::Seconds, "From the first token to the last.");
    describe_histogram!("tandem_request_prompt_tokens", Unit::Count, "Prompt tokens of a finished request.");
    describe_histogram!("tandem_request_generation_tokens", Unit::Count, "Generated tokens of a finished request.");
    describe_histogram!(
        "tandem_iteration_tokens",
        Unit::Count,
        "Tokens that an attention worker computed in one step, decode and prefill."
    );
    describe_gauge!("tandem_worker_up", Unit::Count, "1 while the worker is a member of the instance.");
    describe_counter!("tandem_worker_restarts_total", Unit::Count, "New processes that joined under the name of an earlier one.");
    describe_gauge!("tandem_worker_busy_ratio", Unit::Percent, "Share of time that the worker's device was busy lately, 0 to 1.");
    describe_gauge!("tandem_route_table_version", Unit::Count, "Version of the route table in force.");
    if vllm {
        describe_aliases();
    }
}

fn describe_aliases() {
    describe_gauge!("vllm:num_requests_running", Unit::Count, "Alias of tandem_requests_running.");
    describe_gauge!("vllm:num_requests_waiting", Unit::Count, "Alias of tandem_requests_waiting.");
    describe_gauge!("vllm:kv_cache_usage_perc", Unit::Percent, "Alias of tandem_kv_cache_usage_ratio (0 to 1).");
    describe_gauge!("vllm:cache_config_info", Unit::Count, "Pages of an attention worker's latent pool, in the labels.");
    describe_counter!("vllm:prompt_tokens_total", Unit::Count, "Alias of tandem_prompt_tokens_total.");
    describe_counter!("vllm:generation_tokens_total", Unit::Count, "Alias of tandem_generation_tokens_total.");
    describe_counter!("vllm:num_preemptions_total", Unit::Count, "Alias of tandem_preemptions_total.");
    describe_counter!("vllm:prefix_cache_queries_total", Unit::Count, "Alias of tandem_prefix_cache_queries_total.");
    describe_counter!("vllm:prefix_cache_hits_total", Unit::Count, "Alias of tandem_prefix_cache_hits_total.");
    describe_counter!("vllm:request_success_total", Unit::Count, "Alias of tandem_requests_finished_total.");
    let histograms = [
        ("vllm:time_to_first_token_seconds", "Alias of tandem_time_to_first_token_seconds."),
        ("vllm:inter_token_latency_seconds", "Alias of tandem_inter_token_latency_seconds."),
        ("vllm:time_per_output_token_seconds", "Alias of tandem_inter_token_latency_seconds (vLLM's older name)."),
        ("vllm:request_time_per_output_token_seconds", "Mean time per token after the first, by request."),
        ("vllm:e2e_request_latency_seconds", "Alias of tandem_request_duration_seconds."),
        ("vllm:request_queue_time_seconds", "Alias of tandem_request_queue_seconds."),
        ("vllm:request_inference_time_seconds", "From the beginning of prefill to the end."),
        ("vllm:request_prefill_time_seconds", "Alias of tandem_request_prefill_seconds."),
        ("vllm:request_decode_time_seconds", "Alias of tandem_request_decode_seconds."),
        ("vllm:request_prompt_tokens", "Alias of tandem_request_prompt_tokens."),
        ("vllm:request_generation_tokens", "Alias of tandem_request_generation_tokens."),
        ("vllm:iteration_tokens_total", "Alias of tandem_iteration_tokens."),
        ("vllm:request_params_max_tokens", "max_tokens of admitted sequences."),
        ("vllm:request_params_n", "Sequences per API request."),
    ];
    for (name, help) in histograms {
        describe_histogram!(name, Unit::Count, help);
    }
}
