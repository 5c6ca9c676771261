//! The whole model in one process against the Hugging Face reference: prompt logits at every position, greedy continuations through the
//! cache, per-layer streams, router choices and DSA selections.

mod common;

use std::sync::Arc;

use common::{Gold, LOGIT_TOLERANCE, argmax, max_diff};
use tandem_kernels::{Backend, Precision, reference::ReferenceBackend};
use tandem_worker_attn::{Model, observe::Silent};

const PROMPTS: [usize; 6] = [1, 3, 4, 17, 70, 200];

fn prompts_match<B: Backend>(model: &Arc<Model<B>>, gold: &Gold, chunk: usize) {
    let vocab = model.geometry().vocab;
    let mut runner = common::runner(model);
    for n in PROMPTS {
        let mut state = runner.pool().create().unwrap();
        let logits = runner.forward(&mut state, &gold.ids(&format!("p{n}.input_ids")), chunk, &mut Silent).unwrap();
        let worst = max_diff(&logits, &gold.f32s(&format!("p{n}.logits")));
        assert!(worst <= LOGIT_TOLERANCE, "prompt {n}, chunks of {chunk}: {worst:e}");
        let (greedy, greedy_logits) = (gold.ids(&format!("p{n}.greedy")), gold.f32s(&format!("p{n}.greedy_logits")));
        let mut next = argmax(&logits[(n - 1) * vocab..]);
        for (i, expected) in greedy.iter().enumerate() {
            assert_eq!(next, *expected, "prompt {n}, token {i}");
            if i + 1 < greedy.len() {
                let logits = runner.forward(&mut state, &[next], 1, &mut Silent).unwrap();
                let worst = max_diff(&logits, &greedy_logits[(i + 1) * vocab..(i + 2) * vocab]);
                assert!(worst <= LOGIT_TOLERANCE, "prompt {n}, token {i}: {worst:e}");
                next = argmax(&logits);
            }
        }
        runner.pool().free(state);
    }
}

#[test]
fn tiny_on_the_reference_backend() {
    let model = common::model(ReferenceBackend::<f32>::new(Precision::F32), "tiny");
    prompts_match(&model, &Gold::open("tiny.safetensors"), 256);
}
