//! Sends the load: `/v1/completions` with token-id prompts, streaming, `ignore_eos`, so that every request costs the same.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use futures::StreamExt as _;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use super::report::{Report, Sample};
use crate::{
    cli::LoadArgs,
    client::{Client, chain, sse::Events},
    failure::Failure,
    output,
};

/// Measures and prints.
///
/// # Errors
/// When the server cannot be reached, a request fails, or fewer tokens come than were asked for.
pub async fn run(args: LoadArgs) -> Result<(), Failure> {
    let client = Client::new(&args.server, Some(args.timeout.0))?;
    let model = client.model(args.model.as_deref()).await?;
    let target = Target { model, client, args: args.clone() };
    for index in 0..args.warmup {
        target.measure(u64::from(index)).await?;
    }
    let bar = ProgressBar::new(u64::from(args.requests));
    bar.set_style(ProgressStyle::with_template("{wide_bar} {pos}/{len} {elapsed}").unwrap_or_else(|_| ProgressStyle::default_bar()));
    let next = Arc::new(AtomicU32::new(0));
    let started = Instant::now();
    let lanes = (0..args.concurrency.max(1)).map(|_| {
        let (target, next, bar) = (target.clone(), Arc::clone(&next), bar.clone());
        async move {
            let mut samples = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= target.args.requests {
                    return Ok::<_, Failure>(samples);
                }
                samples.push(target.measure(1_000_000 + u64::from(index)).await?);
                bar.inc(1);
            }
        }
    });
    let samples: Vec<Sample> = futures::future::try_join_all(lanes).await?.into_iter().flatten().collect();
    let report = Report::new(&samples, args.concurrency, started.elapsed());
    bar.finish_and_clear();
    if args.json {
        let json = serde_json::to_string(&report).map_err(|error| Failure::internal(error.to_string()))?;
        output::line(&json)
    } else {
        output::line(&report.to_string())
    }
}

#[derive(Clone)]
struct Target {
    client: Client,
    model: String,
    args: LoadArgs,
}

impl Target {
    /// One request, with a prompt of its own.
    async fn measure(&self, stream_of: u64) -> Result<Sample, Failure> {
        let args = &self.args;
        let failed = |what: String| Failure::unavailable(format!("{}/v1/completions: {what}", self.client.base()));
        let body = json!({
            "model": self.model,
            "prompt": prompt(args.seed ^ stream_of, args.prompt_tokens, args.vocab),
            "max_tokens": args.output_tokens,
            "ignore_eos": true,
            "temperature": 0,
            "return_token_ids": true,
            "stream": true,
        });
        let started = Instant::now();
        let response = self.client.post("/v1/completions", &body).await?;
        let mut events = Events::default();
        let mut arrivals: Vec<(Duration, u32)> = Vec::new();
        let mut bytes = response.bytes_stream();
        while let Some(piece) = bytes.next().await {
            let piece = piece.map_err(|error| failed(chain(&error)))?;
            for data in events.push(&piece) {
                if data == "[DONE]" {
                    continue;
                }
                let value: Value = serde_json::from_str(&data).map_err(|error| failed(format!("not JSON: {error}: {data}")))?;
                if !value["error"].is_null() {
                    return Err(failed(value["error"].to_string()));
                }
                let tokens = value["choices"][0]["token_ids"].as_array().map_or(0, Vec::len);
                if tokens > 0 {
                    arrivals.push((started.elapsed(), u32::try_from(tokens).unwrap_or(u32::MAX)));
                }
            }
        }
        let sample = sample_of(args.prompt_tokens, &arrivals);
        if sample.output_tokens != args.output_tokens {
            return Err(failed(format!("{} tokens came, {} were asked for", sample.output_tokens, args.output_tokens)));
        }
        Ok(sample)
    }
}

/// Times from arrivals (time since sending, tokens). Tokens that arrive together share the gap before them.
fn sample_of(prompt_tokens: u32, arrivals: &[(Duration, u32)]) -> Sample {
    let mut sample = Sample { prompt_tokens, ..Sample::default() };
    let mut last = None;
    for &(at, tokens) in arrivals {
        sample.output_tokens += tokens;
        sample.total = at;
        match last {
            None => {
                sample.ttft = at;
                sample.gaps.extend((1..tokens).map(|_| Duration::ZERO));
            }
            Some(before) => sample.gaps.extend((0..tokens).map(|_| (at - before) / tokens.max(1))),
        }
        last = Some(at);
    }
    sample
}

/// Token ids from a counter-based hash (splitmix64): the same for the same seed on every machine.
fn prompt(seed: u64, tokens: u32, vocab: u32) -> Vec<u32> {
    (0..u64::from(tokens))
        .map(|index| {
            let mut z = seed.wrapping_mul(0x2545_F491_4F6C_DD1D).wrapping_add((index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            u32::try_from((z ^ (z >> 31)) % u64::from(vocab.max(1))).unwrap_or_default()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_arrive_together_share_the_gap() {
        let ms = Duration::from_millis;
        let sample = sample_of(7, &[(ms(100), 1), (ms(110), 1), (ms(130), 2)]);
        assert_eq!((sample.output_tokens, sample.ttft, sample.total), (4, ms(100), ms(130)));
        assert_eq!(sample.gaps, [ms(10), ms(10), ms(10)]);
    }

    #[test]
    fn prompts_differ_by_seed_and_stay_in_the_vocabulary() {
        let one = prompt(1, 1000, 50);
        assert_eq!(one, prompt(1, 1000, 50));
        assert_ne!(one, prompt(2, 1000, 50));
        assert!(one.iter().all(|id| *id < 50) && (0..50).all(|id| one.contains(&id)));
    }
}
