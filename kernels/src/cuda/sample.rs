//! Sampling: greedy and judged rows on the device; settings that look at the whole distribution (draws, penalties, all log-probabilities) on
//! the host, with the CPU backend's sampler on a copy of the row.

use super::{
    CudaBackend, CudaBuf,
    compile::SAMPLE,
    driver::{Grid, launch},
    memory::{Use, bytes_of, bytes_of_mut},
};
use crate::{SampleRow, Sampled, cpu};

/// Most likely tokens that the device reports of a row; more are read off a copy of it.
const DEVICE_TOP: u32 = 32;

impl CudaBackend {
    /// See [`crate::Backend::sample`].
    pub(super) fn run_sample(&self, logits: &CudaBuf, vocab: usize, rows: &[SampleRow]) -> Result<Vec<Sampled>, String> {
        self.device.bind()?;
        let last = rows.iter().map(|r| r.row as usize + 1).max().unwrap_or(0);
        let at = logits.f32s(last * vocab)?;
        for row in rows {
            let ids = row.seen.iter().map(|s| s.0).chain(row.bias.iter().map(|b| b.0)).chain(row.forced);
            if let Some(id) = ids.into_iter().find(|&id| id as usize >= vocab) {
                return Err(format!("token {id} is not one of {vocab}"));
            }
        }
        let (here, there): (Vec<usize>, Vec<usize>) = (0..rows.len()).partition(|&i| on_device(&rows[i]));
        let mut out: Vec<Option<Sampled>> = vec![None; rows.len()];
        for (i, sampled) in here.iter().zip(self.judge(at, vocab, &here.iter().map(|&i| &rows[i]).collect::<Vec<_>>())?) {
            out[*i] = Some(sampled);
        }
        if !there.is_empty() {
            let (mut copied, mut values) = (None, vec![0.0f32; vocab]);
            let mut sampler = cpu::RowSampler::new();
            for i in there {
                let row = &rows[i];
                if copied != Some(row.row) {
                    // SAFETY: the row lies inside of the buffer, whose length was checked for the last of them.
                    unsafe { self.staging.lock().download(at + (4 * row.row as usize * vocab) as u64, bytes_of_mut(&mut values))? };
                    copied = Some(row.row);
                }
                out[i] = Some(sampler.sample(&values, row));
            }
        }
        self.device.sync()?;
        Ok(out.into_iter().flatten().collect())
    }

    /// Best or given tokens of rows, on the device.
    fn judge(&self, logits: u64, vocab: usize, rows: &[&SampleRow]) -> Result<Vec<Sampled>, String> {
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let n = rows.len();
        let top = |r: &SampleRow| r.logprobs.map_or(-1, |t| t.min(vocab as u32) as i32);
        let most = rows.iter().map(|r| top(r)).max().unwrap_or(0).max(0) as usize;
        let wanted: Vec<i32> = rows.iter().flat_map(|r| [r.row as i32, r.forced.map_or(-1, |t| t as i32), top(r)]).collect();
        let results = n * 4 + n * most * 2;
        let at = self.scratch.lock().get(&self.device, Use::Sample, 4 * (wanted.len() + results))?;
        let (answers, tops) = (at + 4 * wanted.len() as u64, at + 4 * (wanted.len() + 4 * n) as u64);
        let mut staging = self.staging.lock();
        // SAFETY: the scratch holds what is wanted and the results.
        unsafe { staging.upload(bytes_of(&wanted), at)? };
        // Of the chip alone: the sums' order, and with it a log-probability's last bits, is one for any number of rows.
        let (name, blocks) = if self.device.clusters() { ("judge_8", [8, n, 1]) } else { ("judge", [n, 1, 1]) };
        launch!(self, SAMPLE, name, Grid::new(blocks, 1024); logits, vocab as i32, at, answers, tops, most as i32)?;
        let mut values = vec![0.0f32; results];
        // SAFETY: as above.
        unsafe { staging.download(answers, bytes_of_mut(&mut values))? };
        let (answers, tops) = values.split_at(4 * n);
        let sampled = rows.iter().enumerate().map(|(i, row)| {
            let a = &answers[4 * i..4 * i + 4];
            let tops = tops[2 * i * most..].as_chunks::<2>().0.iter().take(top(row).max(0) as usize);
            Sampled {
                token: a[0].to_bits(),
                logprob: a[1],
                rank: a[2] as u32,
                top: tops.map(|t| (t[0].to_bits(), t[1])).collect(),
                finite: a[3] > 0.0,
            }
        });
        Ok(sampled.collect())
    }
}

/// Whether the device answers a row.
fn on_device(row: &SampleRow) -> bool {
    let plain = row.forced.is_some() || (row.temperature <= 0.0 && row.bias.is_empty() && row.seen.is_empty() && row.allowed.is_none());
    plain && row.logprobs.is_none_or(|n| n <= DEVICE_TOP)
}
