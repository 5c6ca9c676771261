//! Every kernel of the pack at a small odd size, and the small models whole: what runs under `compute-sanitizer` (`scripts/gpu-bench sanitize`), and
//! says on any GPU which kernels nothing launches. No result is judged here: the conformance suite does that, and the host would be slow at it.
//!
//! Neighbours: `forward.rs` (a whole model), the conformance suite's cases, which know their inputs.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    process::{Command, Stdio},
    time::Instant,
};

use tandem_kernels::{
    Backend, BatchDesc, Elem, ExpertSource, IndexerParams, KdaDims, MlaParams, Precision, SampleRow, Segment, StateSpec,
    conformance::{
        kda::Kda,
        mhc::Mhc,
        mla::{Attend, Select},
        noise::Noise,
        rig::{Rig, RowCase},
        router::Router,
        rows,
        sequences::{self, Plan, SequenceCase},
    },
    cuda::{CudaBackend, selftest},
};
use tandem_model::{
    Checkpoint,
    synthetic::{Preset, write},
};
use tempfile::TempDir;

use super::{cuda, forward::Model};

/// A stored type for each unit of products, and those whose layout has a kernel of its own.
const KINDS: [&str; 13] =
    ["f32", "f16", "bf16", "e4m3-block", "nvfp4", "mxfp4", "q8_0", "gguf-mxfp4", "Q3_K", "IQ4_NL", "Q6_K", "Q5_K", OTHER];
/// One of codes with minima: beside another one in an MLP, products of many rows are made by the kernels that any chip has.
const OTHER: &str = "Q4_K";
/// Rows that fill a tile of 8, of 16, of 32, of 64, and the kernels for many.
const ROWS: [usize; 5] = [1, 9, 20, 40, 130];
/// Set in a process that lends memory to its parent.
const LENDER: &str = "TANDEM_TEST_LENDER";
/// Elements that it lends.
const LENT: usize = 3000;

/// Says how long each case took: under a tool that is what one asks.
struct Cases<'a> {
    b: &'a CudaBackend,
    began: Instant,
}

impl Cases<'_> {
    fn done(&self, what: &str) {
        self.b.sync().unwrap();
        println!("{:>7.2} s  {} {what}", self.began.elapsed().as_secs_f64(), self.b.precision());
    }

    fn rows<C: RowCase>(&self, what: &str, case: &C) {
        case.run(&Rig(self.b), 0..case.rows()).unwrap_or_else(|e| panic!("{what}: {e}"));
        self.done(&format!("{what}, {} rows", case.rows()));
    }

    /// One sequence in steps of so many rows.
    fn steps<C: SequenceCase>(&self, what: &str, case: &C, steps: &[usize]) {
        let plan = Plan { sequences: 1, steps: steps.iter().map(|&rows| vec![(0, rows)]).collect() };
        sequences::run(self.b, case, &plan, 1).unwrap_or_else(|e| panic!("{what}: {e}"));
        self.done(&format!("{what}, steps of {steps:?}"));
    }

    fn model(&self, precision: Precision, preset: Preset, chunks: &[usize]) {
        let dir = TempDir::new().unwrap();
        write(preset, dir.path(), &[]).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let mut model = Model::load(cuda(precision).unwrap(), &checkpoint, chunks.iter().sum());
        let (mut pos, vocab) = (0, checkpoint.geometry().vocab);
        for &rows in chunks {
            model.forward(&(pos..pos + rows).map(|t| (t * 31 % vocab) as u32).collect::<Vec<_>>(), pos);
            pos += rows;
        }
        self.done(&format!("{preset:?}, chunks of {chunks:?}"));
    }

    fn products(&self) {
        let few = self.b.precision() == Precision::F32;
        for kind in KINDS {
            let mut n = Noise::new(5);
            let mut matrix = |kind, rows, cols| selftest::matrix(&mut n, kind, rows, cols).unwrap();
            let (flat, long) = (matrix(kind, 37, 512), matrix(kind, 19, 1024));
            let [own, first, second] = [(kind, kind), (kind, OTHER), (OTHER, kind)].map(|(gate, down)| ExpertSource {
                gate: matrix(gate, 256, 512),
                up: matrix(gate, 256, 512),
                down: matrix(down, 512, 256),
            });
            let apart = ExpertSource { up: second.up.clone(), ..own.clone() };
            let n = &mut Noise::new(6);
            for rows in if few { &[3][..] } else { &ROWS } {
                self.rows(&format!("{kind} product"), &rows::Linear::of(n, *rows, vec![flat.clone()]));
                self.rows(&format!("{kind} MLP"), &rows::Mlp::of(n, *rows, own.clone()));
            }
            self.rows(&format!("{kind} product of few outputs"), &rows::Linear::of(n, 2, vec![long.clone()]));
            self.rows(&format!("{kind} product of few outputs"), &rows::Linear::of(n, 70, vec![long]));
            let many = if few { 5 } else { ROWS[4] };
            self.rows(&format!("{kind} experts"), &rows::Experts::of(n, 3, vec![own.clone(); 2], 3));
            self.rows(&format!("{kind} experts"), &rows::Experts::of(n, many, vec![own.clone(); 3], 3));
            self.rows(&format!("{kind} and {OTHER} MLP"), &rows::Mlp::of(n, many, first));
            self.rows(&format!("{OTHER} and {kind} MLP"), &rows::Mlp::of(n, many, second));
            self.rows(&format!("{kind} experts, gate and up apart"), &rows::Experts::of(n, 3, vec![apart; 2], 2));
        }
    }

    fn rows_alone(&self) {
        self.rows("embedding", &rows::Embed::new(1, 5, 37, 53, 4).unwrap());
        self.rows("norm", &rows::Norm::new(2, 3, 333));
        self.rows("router", &Router::new(3, 5).unwrap());
        for (rows, streams, hidden) in [(1, 4, 512), (5, 4, 512), (67, 4, 192), (3, 3, 70)] {
            self.rows("hyper-connections", &Mhc::new(4, rows, streams, hidden).unwrap());
        }
        let (b, vocab) = (self.b, 1003);
        let logits = b.vector("logits", &Noise::new(7).values(3 * vocab, 0.0, 1.0)).unwrap();
        let rows: Vec<_> = (0..3).map(greedy).collect();
        assert_eq!(b.sample(&logits, vocab, &rows).unwrap().len(), 3);
        let mut sum = b.vector("sum", &[0.5; 300]).unwrap();
        b.add(3, 100, &logits, &mut sum);
        b.non_finite(3, vocab, &logits).unwrap();
        b.read_bandwidth(1).unwrap();
        self.done("sampling, sums, reading");
    }

    fn mixers(&self) {
        let release = KdaDims { heads: 3, head_dim: 128, conv: 4 };
        // With and without a bound on the decay, which decides how prompts go.
        for seed in 0..3 {
            self.steps("KDA", &Kda::sized(seed, release), &[19, 5, 1]);
        }
        // More heads than multiprocessors.
        self.steps("KDA of many heads", &Kda::sized(3, KdaDims { heads: 140, ..release }), &[1]);
        self.steps("KDA of another shape", &Kda::new(1), &[17, 1]);
        let latent = MlaParams { heads: 17, qk_dim: 96, v_dim: 64, latent: 512 };
        let rows = if self.b.precision() == Precision::F32 { 18 } else { 70 };
        for kind in ["bf16", "f16"] {
            let kv_b = selftest::matrix(&mut Noise::new(8), kind, latent.heads * (latent.qk_dim + latent.v_dim), latent.latent).unwrap();
            self.steps(&format!("attention, {kind}"), &Attend::of(9, kv_b, latent.heads, latent.qk_dim), &[rows, 5, 1]);
        }
        self.steps("attention over many", &Attend::sized(2, latent, 150).unwrap(), &[rows, 1]);
        let wide = selftest::matrix(&mut Noise::new(8), "bf16", 3 * (256 + 128), latent.latent).unwrap();
        self.steps("attention of wide heads", &Attend::of(5, wide, 3, 256), &[rows, 18]);
        self.steps("attention of another shape", &Attend::new(3).unwrap(), &[20, 1]);
        let index = IndexerParams { heads: 32, dim: 128, kpool: 4, topk: 16, always_tail: true };
        self.steps("index", &Select::sized(3, index), &[71, 5, 1]);
        // Pools enough for the kernels of long contexts.
        self.steps("index of single keys", &Select::sized(3, IndexerParams { kpool: 1, ..index }), &[80, 63]);
        self.late_row(&IndexerParams { kpool: 1, ..index }, 13_011);
        self.steps("index of another shape", &Select::new(4), &[40, 1]);
    }

    /// One row of the index far into a sequence whose keys nothing wrote.
    fn late_row(&self, p: &IndexerParams, pos: usize) {
        let (b, page_tokens) = (self.b, 64);
        let pages = (pos + 1).div_ceil(page_tokens);
        let kda = KdaDims { heads: 1, head_dim: 8, conv: 2 };
        let spec =
            StateSpec { slots: 1, pages, page_tokens, kda_layers: 1, mla_layers: 1, kda, latent: 8, index_dim: p.dim, kpool: p.kpool };
        let segment = Segment { slot: 0, row0: 0, rows: 1, pos0: pos as u32, pages: 0..pages as u32 };
        let batch = Rig(b).batch(&BatchDesc { tokens: vec![0], segments: vec![segment], pages: (0..pages as u32).collect() }).unwrap();
        let state = b.state(&spec).unwrap();
        let (iq, proj) = (b.vector("iq", &vec![0.5; p.heads * p.dim]).unwrap(), b.vector("weights", &vec![0.5; p.heads]).unwrap());
        let mut selected = b.alloc("selected", Elem::I32, p.width()).unwrap();
        b.index_select(&batch, 0, &iq, &proj, p.heads, 0, p, &state, &mut selected);
        self.done("index far into a sequence");
    }

    /// Rows that another process lends: it is this program again.
    fn lent(&self) {
        let test = ["every_kernel::lends_to_its_parent", "--exact", "--ignored", "--nocapture"];
        let mut child = Command::new(std::env::current_exe().unwrap());
        let mut child =
            child.args(test).env(LENDER, self.b.precision().to_string()).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let handle =
            lines.find_map(|line| line.split_once("LENDS ").map(|(_, handle)| handle.to_owned())).expect("the lender says what it lends");
        // What is lent here, no one opens.
        let region = self.b.lend(LENT).unwrap().unwrap();
        self.b.put(LENT - 7, &self.b.vector("x", &[1.5; LENT]).unwrap(), 3, &region, 4);
        let window = self.b.open(handle.as_bytes()).unwrap();
        let mut out = self.b.alloc("out", Elem::F32, LENT).unwrap();
        self.b.take(LENT - 7, &window, 3, &mut out, 4);
        self.b.take_sum(LENT - 7, &window, 3, &mut out, 4);
        self.done("rows that another process lends");
        drop(window);
        drop(child.stdin.take());
        lines.for_each(drop);
        assert!(child.wait().unwrap().success());
    }
}

fn greedy(row: u32) -> SampleRow {
    SampleRow { logprobs: Some(3), ..SampleRow::greedy(row) }
}

#[test]
fn cuda_launches_every_kernel() {
    let Some(b) = cuda(Precision::F32) else { return };
    let began = Instant::now();
    let wide = cuda(Precision::Bf16).unwrap();
    // All units, compiled on many threads where they must be.
    b.census().unwrap();
    for b in [&b, &wide] {
        let cases = Cases { b, began };
        cases.rows_alone();
        cases.products();
        cases.mixers();
        cases.lent();
        cases.model(b.precision(), Preset::Tiny, &[70, 1, 3]);
        cases.model(b.precision(), Preset::TinyB, &[150, 1]);
    }
    let mut all = b.census().unwrap();
    for (one, other) in all.iter_mut().zip(wide.census().unwrap()) {
        assert_eq!((one.unit, &one.kernel), (other.unit, &other.kernel));
        one.launched |= other.launched;
    }
    let names =
        |launched: bool| all.iter().filter(|k| k.launched == launched).map(|k| format!("{}:{}", k.unit, k.kernel)).collect::<Vec<_>>();
    println!("{} kernels launched: {}", names(true).len(), names(true).join(" "));
    let mut never = names(false);
    println!("never launched: {}", never.join(" "));
    // In its place goes the one with clusters, on every chip that has them; others have more kernels that their rules never choose.
    never.retain(|name| name != "sample:judge");
    assert!(
        never.is_empty() || !b.device().arithmetic.starts_with("cuda-sm90-"),
        "{} kernels were never launched: {}",
        never.len(),
        never.join(" ")
    );
}

/// The other half of [`Cases::lent`]: does nothing where no parent asks for it.
#[test]
#[ignore = "a part of cuda_launches_every_kernel, which starts it"]
fn lends_to_its_parent() {
    let Ok(precision) = std::env::var(LENDER) else { return };
    let precision = [Precision::F32, Precision::Bf16].into_iter().find(|p| p.to_string() == precision).expect("a precision");
    let b = cuda(precision).unwrap();
    let region = b.lend(LENT).unwrap().unwrap();
    let x = b.vector("x", &[1.5; LENT]).unwrap();
    b.put(LENT, &x, 0, &region, 0);
    b.sync().unwrap();
    println!("\nLENDS {}", String::from_utf8(b.handle(&region)).unwrap());
    std::io::stdout().flush().unwrap();
    // Until the parent closes its end.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}
