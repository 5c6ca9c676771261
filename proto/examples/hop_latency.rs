//! Round trips of the expert hop on this machine: `cargo run --release -p tandem-proto --example hop_latency [tcp|grpc] [ROWS] [COUNT]`.
//! Worker and attention side are threads of one process with an engine that returns its input, so this is the cost of the hop alone.

use std::error::Error;
use std::time::{Duration, Instant};

use tandem_proto::hop::{Dispatch, ExpertEngine, ExpertListener, HopOptions, HostHop, Partial, ServerOptions};
use tandem_proto::link::LinkKind;
use tandem_proto::payload::Precision;
use tandem_proto::route_table::{Holder, Route, RouteTable, ShardDesc};
use tokio::sync::watch;

const HIDDEN: usize = 4096;
const TOPK: usize = 8;
const SPIN: Duration = Duration::from_millis(1);

struct Echo;

impl ExpertEngine for Echo {
    fn execute(&mut self, _: u16, dispatches: &[Dispatch<'_>]) -> Vec<Result<Partial, String>> {
        dispatches.iter().map(|dispatch| Ok(dispatch.x.to_vec().into())).collect()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let kind: LinkKind = args.next().as_deref().unwrap_or("tcp").parse()?;
    let rows: usize = args.next().as_deref().unwrap_or("1").parse()?;
    let count: u64 = args.next().as_deref().unwrap_or("5000").parse()?;
    let any = Some("127.0.0.1:0".parse()?);
    let listener = if kind == LinkKind::Tcp { ExpertListener::bind(any, None)? } else { ExpertListener::bind(None, any)? };
    let addresses = listener.addresses().to_vec();
    let options = ServerOptions {
        name: "experts-0".into(),
        epoch: 1,
        host: String::new(),
        fingerprint: "f".into(),
        arithmetic: "echo".into(),
        precision: Precision::Bf16,
        hidden: HIDDEN,
        topk: TOPK,
        shards: vec![0],
        max_rows: 8192,
        spin: SPIN,
        memory: None,
    };
    let server = listener.serve(options, Box::new(Echo))?;
    let holder = Holder {
        worker: "experts-0".into(),
        epoch: 1,
        arithmetic: "echo".into(),
        host: String::new(),
        addresses,
        ready: true,
        local: false,
    };
    let shard = ShardDesc { id: 0, layers: std::iter::once(0..1).collect(), experts: 0..1, ffn: 0..1 };
    let table = RouteTable { coordinator_epoch: 1, version: 1, routes: vec![Route { shard, holders: vec![holder] }] };
    let (_routes, follow) = watch::channel(table);
    let mut hop = HostHop::new(HopOptions { spin: SPIN, ..HopOptions::new("attn-0", 2, "f", Precision::Bf16, HIDDEN, TOPK) }, follow)?;
    let (x, ids, weights) = (vec![1.0; rows * HIDDEN], vec![0; rows * TOPK], vec![0.1; rows * TOPK]);
    let mut out = vec![0.0; x.len()];
    let mut took = Vec::new();
    for step in 0..count + count / 10 {
        hop.begin_step(step + 1, rows as u32);
        let start = Instant::now();
        let ticket = hop.submit(0, 0, &x, &ids, &weights, start + Duration::from_secs(10))?;
        hop.collect(ticket, &mut out)?;
        took.push(start.elapsed());
    }
    let took = &mut took[(count / 10) as usize..];
    took.sort_unstable();
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize];
    let last = hop.timings();
    println!("{kind}, {rows} rows of {HIDDEN} bf16: p50 {:?}, p99 {:?}, p99.9 {:?} over {count}", at(0.5), at(0.99), at(0.999));
    println!("the last one: send {:?}, queue {:?}, compute {:?}, return {:?}", last.send, last.queue, last.compute, last.ret);
    server.stop()?;
    Ok(())
}
