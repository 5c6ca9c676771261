//! The expert side's memory, without I/O or clock: gathers the pieces of each submission, decides what is computed next, and keeps the
//! last answers for pieces that arrive again. [`super::server`] feeds it.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::Instant;

use bytes::Bytes;

use super::LATENCY_ROWS;
use super::engine::{Dispatch, Partial};
use super::shared::{Lease, SharedRows};
use crate::frame::{Dtype, ErrorCode, Frame, Header, Kind};
use crate::payload::{BufferPool, ExpertTimings, PLACE_LEN, RowShape};

/// A connection, unique within the server's life.
pub(super) type ConnId = u64;

/// Latency batches that may pass before a waiting bulk batch gets its turn.
const BULK_PATIENCE: u32 = 4;
/// Bytes of answers kept for pieces that arrive again.
const RECENT_BYTES: usize = 64 << 20;
/// Bytes of buffers kept for the next layer, of each kind.
const SPARE_BYTES: usize = 32 << 20;
/// Steps of one attention worker whose submissions may be open at once; older ones are given up by then.
const OPEN_STEPS: u64 = 8;

/// One submission: all its pieces share this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct GroupKey {
    pub epoch: u64,
    pub step_id: u64,
    pub layer: u16,
    pub shard_id: u32,
    pub row_base: u32,
}

impl GroupKey {
    fn of(header: &Header) -> Self {
        let Header { epoch, step_id, layer, shard_id, row_base, .. } = *header;
        Self { epoch, step_id, layer, shard_id, row_base }
    }
}

/// Rows of one submission, as far as they arrived.
#[derive(Debug)]
pub(super) struct Group {
    /// Connection that sent the last piece: it gets the answer.
    pub owner: ConnId,
    pub key: GroupKey,
    pub route_version: u32,
    pub rows: usize,
    missing: usize,
    /// Row offset (within the submission) → rows.
    pieces: BTreeMap<usize, usize>,
    buffers: RowBuffers,
    /// Where the activations are, if not in the buffers.
    shared: Option<SharedRows>,
    /// When the last piece arrived.
    pub complete_at: Instant,
}

#[derive(Debug, Default)]
struct RowBuffers {
    ids: Vec<i32>,
    weights: Vec<f32>,
    x: Vec<f32>,
}

impl RowBuffers {
    fn bytes(&self) -> usize {
        4 * (self.ids.capacity() + self.weights.capacity() + self.x.capacity())
    }
}

impl Group {
    /// The group as the engine sees it.
    pub fn dispatch(&self) -> Dispatch<'_> {
        let RowBuffers { ids, weights, x } = &self.buffers;
        let x = if self.shared.is_some() { &[] } else { x.as_slice() };
        Dispatch { shard: self.key.shard_id, rows: self.rows, x, shared: self.shared, ids, weights }
    }

    fn header(&self, kind: Kind) -> Header {
        let GroupKey { epoch, step_id, layer, shard_id, row_base } = self.key;
        Header {
            epoch,
            step_id,
            layer,
            shard_id,
            row_base,
            row_offset: row_base,
            route_version: self.route_version,
            rows: self.rows as u32,
            rows_total: self.rows as u32,
            ..Header::new(kind)
        }
    }
}

/// What became of a piece.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Accepted {
    /// Kept; its submission lacks others.
    Gathered,
    /// Kept; its submission is complete and waits for [`Gather::take_batch`].
    Ready,
    /// It was here already; its answer will come.
    Duplicate,
    /// It was answered already: the same answer again.
    Replay(Frame),
}

/// Submissions of one layer to compute together.
#[derive(Debug)]
pub(super) struct Batch {
    pub layer: u16,
    pub groups: Vec<Group>,
}

/// Sizes that bound what is kept.
#[derive(Clone, Debug)]
pub(super) struct GatherLimits {
    pub shape: RowShape,
    pub shards: Vec<u32>,
    pub max_rows: u32,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Gather {
    limits: GatherLimits,
    groups: HashMap<GroupKey, Group>,
    ready_small: VecDeque<GroupKey>,
    ready_bulk: VecDeque<GroupKey>,
    passed_bulk: u32,
    recent: Recent,
    spare: Vec<RowBuffers>,
    pool: BufferPool,
    leases: HashMap<ConnId, Lease>,
}

impl Gather {
    pub fn new(limits: GatherLimits) -> Self {
        Self {
            limits,
            groups: HashMap::new(),
            ready_small: VecDeque::new(),
            ready_bulk: VecDeque::new(),
            passed_bulk: 0,
            recent: Recent::default(),
            spare: Vec::new(),
            pool: BufferPool::new(SPARE_BYTES),
            leases: HashMap::new(),
        }
    }

    /// Dispatches of `conn` may have their rows in shared memory from now on.
    pub fn lend(&mut self, conn: ConnId, lease: Lease) {
        self.leases.insert(conn, lease);
    }

    /// Where the rows of a dispatch are, if not in its payload.
    fn shared(&self, conn: ConnId, header: &Header, payload: &[u8]) -> Result<Option<SharedRows>, String> {
        if header.dtype != Dtype::Shared {
            return Ok(None);
        }
        let Some(lease) = self.leases.get(&conn) else { return Err("rows in shared memory, but none is lent on this link".to_owned()) };
        let row = payload.first_chunk::<PLACE_LEN>().map_or(u64::MAX, |b| u64::from_le_bytes(*b));
        let rows = u64::from(header.rows_total);
        if header.rows != header.rows_total || row.checked_add(rows).is_none_or(|end| end > u64::from(lease.rows)) {
            return Err(format!("rows {row}+{rows} of shared memory; one piece within {} rows is needed", lease.rows));
        }
        Ok(Some(SharedRows { lease: *lease, row: row as usize }))
    }

    /// Takes one Dispatch piece from `conn`. An error is for the peer: the piece does not fit what the handshake agreed on.
    pub fn accept(&mut self, conn: ConnId, header: &Header, payload: &[u8], now: Instant) -> Result<Accepted, String> {
        let key = GroupKey::of(header);
        if let Some(frame) = self.recent.answer(&key, header) {
            return Ok(Accepted::Replay(frame));
        }
        self.check(conn, header, &key)?;
        let shared = self.shared(conn, header, payload)?;
        if self.groups.get(&key).is_some_and(|group| group.shared != shared) {
            // Sent again over another link, or in another form: what came before may lie in memory that is given back by now.
            self.drop_groups(|old, _| *old == key);
        }
        if shared.is_some() {
            // Given up, whoever asks for a later layer in the same rows: computed now, it would write over rows that this one is answered in.
            // Other rows may be those of another micro-batch, which is a layer behind.
            let passed = |old: &GroupKey| old.epoch == key.epoch && (old.step_id, old.layer) < (key.step_id, key.layer);
            let places = |shared: Option<SharedRows>, rows: usize| shared.map_or(0..0, |s| s.row..s.row + rows);
            let new = places(shared, header.rows_total as usize);
            self.drop_groups(|old, group| {
                let place = places(group.shared, group.rows);
                group.owner == conn && passed(old) && place.start < new.end && new.start < place.end
            });
        }
        let (offset, rows) = ((header.row_offset - header.row_base) as usize, header.rows as usize);
        let RowShape { hidden, topk, .. } = self.limits.shape;
        let group = match self.groups.entry(key) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                let total = header.rows_total as usize;
                let mut buffers = self.spare.pop().unwrap_or_default();
                buffers.ids.resize(total * topk, 0);
                buffers.weights.resize(total * topk, 0.0);
                buffers.x.resize(if shared.is_some() { 0 } else { total * hidden }, 0.0);
                entry.insert(Group {
                    owner: conn,
                    key,
                    route_version: header.route_version,
                    rows: total,
                    missing: total,
                    pieces: BTreeMap::new(),
                    buffers,
                    shared,
                    complete_at: now,
                })
            }
        };
        if group.pieces.get(&offset) == Some(&rows) {
            group.owner = conn;
            return Ok(Accepted::Duplicate);
        }
        let before = group.pieces.range(..=offset).next_back().is_some_and(|(start, len)| start + len > offset);
        let after = group.pieces.range(offset..).next().is_some_and(|(start, _)| *start < offset + rows);
        if before || after {
            return Err(format!("rows {offset}+{rows} overlap a piece that arrived before with another cut"));
        }
        let RowBuffers { ids, weights, x } = &mut group.buffers;
        let (t, h) = (offset * topk..(offset + rows) * topk, offset * hidden..(offset + rows) * hidden);
        let shape = &self.limits.shape;
        let read = match shared {
            Some(_) => shape.get_shared_dispatch(payload, rows, &mut ids[t.clone()], &mut weights[t]).map(|_| ()),
            None => shape.get_dispatch(header.dtype, payload, rows, &mut ids[t.clone()], &mut weights[t], &mut x[h]),
        };
        read.map_err(|error| error.to_string())?;
        group.owner = conn;
        group.pieces.insert(offset, rows);
        group.missing -= rows;
        group.complete_at = now;
        if group.missing > 0 {
            return Ok(Accepted::Gathered);
        }
        let queue = if header.rows_total > LATENCY_ROWS { &mut self.ready_bulk } else { &mut self.ready_small };
        queue.push_back(key);
        Ok(Accepted::Ready)
    }

    fn check(&self, conn: ConnId, header: &Header, key: &GroupKey) -> Result<(), String> {
        let GatherLimits { shards, max_rows, .. } = &self.limits;
        if !shards.contains(&header.shard_id) {
            return Err(format!("shard is {}; this worker holds {shards:?}", header.shard_id));
        }
        if header.rows_total > *max_rows {
            return Err(format!("a submission of {} rows; at most {max_rows}", header.rows_total));
        }
        match self.groups.get(key) {
            Some(group) if group.rows != header.rows_total as usize => {
                Err(format!("rows_total is {}; an earlier piece of the submission says {}", header.rows_total, group.rows))
            }
            Some(_) => Ok(()),
            None => {
                // Two submissions per shard, decode and prefill, and as many again that were given up and not yet noticed.
                let limit = *max_rows as usize * shards.len() * 4;
                let open: usize = self.groups.values().filter(|group| group.owner == conn).map(|group| group.rows).sum();
                if open + header.rows_total as usize > limit {
                    return Err(format!("{open} rows are open on this link already; at most {limit}"));
                }
                Ok(())
            }
        }
    }

    /// A step began on the attention worker of `epoch`: what it left open long ago is given up.
    pub fn begin_step(&mut self, epoch: u64, step_id: u64) {
        self.drop_groups(|key, _| key.epoch == epoch && key.step_id.saturating_add(OPEN_STEPS) <= step_id);
    }

    /// A connection ended: what it asked for is not computed. Pieces come again on its successor, if it has one.
    pub fn disconnect(&mut self, conn: ConnId) {
        self.leases.remove(&conn);
        self.drop_groups(|_, group| group.owner == conn);
    }

    fn drop_groups(&mut self, dead: impl Fn(&GroupKey, &Group) -> bool) {
        let gone: HashSet<GroupKey> = self.groups.iter().filter(|(key, group)| dead(key, group)).map(|(key, _)| *key).collect();
        if !gone.is_empty() {
            self.groups.retain(|key, _| !gone.contains(key));
            self.ready_small.retain(|key| !gone.contains(key));
            self.ready_bulk.retain(|key| !gone.contains(key));
        }
    }

    /// Whether [`Gather::take_batch`] has something.
    pub fn has_work(&self) -> bool {
        !self.ready_small.is_empty() || !self.ready_bulk.is_empty()
    }

    /// The next batch: small submissions first (bulk ones get a turn after [`BULK_PATIENCE`] of them), the oldest one's layer, joined
    /// with every ready submission of its class and layer while the rows fit.
    pub fn take_batch(&mut self) -> Option<Batch> {
        let bulk_turn = self.ready_small.is_empty() || (!self.ready_bulk.is_empty() && self.passed_bulk >= BULK_PATIENCE);
        self.passed_bulk = if bulk_turn || self.ready_bulk.is_empty() { 0 } else { self.passed_bulk + 1 };
        let queue = if bulk_turn { &mut self.ready_bulk } else { &mut self.ready_small };
        let layer = queue.front()?.layer;
        let mut groups: Vec<Group> = Vec::new();
        let mut rows = 0;
        queue.retain(|key| {
            let Some(next) = self.groups.get(key) else { return false };
            if key.layer != layer || (!groups.is_empty() && rows + next.rows > self.limits.max_rows as usize) {
                return true;
            }
            rows += next.rows;
            groups.extend(self.groups.remove(key));
            false
        });
        Some(Batch { layer, groups })
    }

    /// Turns the result for `group` into frames for its owner, and remembers them: a dispatch that arrives again is answered, not
    /// computed. Failures are not remembered.
    /// A partial in shared memory is not: its rows are overwritten by the next layer's.
    pub fn answer(&mut self, group: Group, result: Result<Partial, String>, timings: ExpertTimings) -> Vec<Frame> {
        let RowShape { hidden, precision, .. } = self.limits.shape;
        let partial = match result {
            Ok(Partial::Host(partial)) if partial.len() == group.rows * hidden && group.shared.is_none() => partial,
            Ok(Partial::Shared { non_finite }) if group.shared.is_some() => {
                let mut payload = self.pool.take(0);
                self.limits.shape.put_shared_combine(&mut payload, timings, &non_finite);
                let header = Header { dtype: Dtype::Shared, ..group.header(Kind::Combine) };
                self.keep_buffers(group.buffers);
                return vec![Frame { header, payload: payload.freeze() }];
            }
            Ok(Partial::Shared { .. }) => {
                let message = "the engine left a partial in shared memory that was not lent for it";
                return vec![error_frame(group.header(Kind::Error), ErrorCode::Engine, message)];
            }
            Ok(Partial::Host(partial)) => {
                let message = format!("the engine returned {} elements; needed {} rows x {hidden}", partial.len(), group.rows);
                return vec![error_frame(group.header(Kind::Error), ErrorCode::Engine, &message)];
            }
            Err(message) => return vec![error_frame(group.header(Kind::Error), ErrorCode::Engine, &message)],
        };
        let frames: Vec<Frame> = group
            .pieces
            .iter()
            .map(|(offset, rows)| {
                let mut payload = self.pool.take(0);
                self.limits.shape.put_combine(&mut payload, timings, &partial[offset * hidden..(offset + rows) * hidden]);
                let header = Header {
                    row_offset: group.key.row_base + *offset as u32,
                    rows: *rows as u32,
                    dtype: precision.dtype(),
                    ..group.header(Kind::Combine)
                };
                Frame { header, payload: payload.freeze() }
            })
            .collect();
        self.recent.keep(group.key, frames.clone(), &mut self.pool);
        self.keep_buffers(group.buffers);
        frames
    }

    fn keep_buffers(&mut self, buffers: RowBuffers) {
        let kept: usize = self.spare.iter().map(RowBuffers::bytes).sum();
        if kept + buffers.bytes() <= SPARE_BYTES {
            self.spare.push(buffers);
        }
    }
}

/// An Error frame for the submission or piece that `header` names.
pub(super) fn error_frame(header: Header, code: ErrorCode, message: &str) -> Frame {
    let mut text = message.to_owned();
    while text.len() > 4096 {
        text.pop();
    }
    Frame { header: Header { kind: Kind::Error, aux: code as u32, ..header }, payload: Bytes::from(text) }
}

/// The last answers, oldest first.
#[derive(Debug, Default)]
struct Recent {
    answers: VecDeque<(GroupKey, Vec<Frame>)>,
    bytes: usize,
}

impl Recent {
    fn answer(&self, key: &GroupKey, header: &Header) -> Option<Frame> {
        let (_, frames) = self.answers.iter().rev().find(|(k, _)| k == key)?;
        frames.iter().find(|f| f.header.row_offset == header.row_offset && f.header.rows == header.rows).cloned()
    }

    /// Keeps an answer. An attention worker that has moved on needs none of the layers before.
    fn keep(&mut self, key: GroupKey, frames: Vec<Frame>, pool: &mut BufferPool) {
        self.bytes += size(&frames);
        self.answers.push_back((key, frames));
        let passed = |old: &GroupKey| old.epoch == key.epoch && (old.step_id, old.layer) < (key.step_id, key.layer);
        let mut at = 0;
        while at < self.answers.len() {
            let over = self.bytes > RECENT_BYTES && at + 1 < self.answers.len();
            if over || passed(&self.answers[at].0) {
                if let Some((_, frames)) = self.answers.remove(at) {
                    self.bytes -= size(&frames);
                    for frame in frames {
                        pool.give(frame.payload);
                    }
                }
            } else {
                at += 1;
            }
        }
    }
}

fn size(frames: &[Frame]) -> usize {
    frames.iter().map(Frame::wire_len).sum()
}

/// A dispatch payload, for tests and benchmarks of this module.
#[cfg(test)]
pub(super) fn dispatch_payload(shape: &RowShape, ids: &[i32], weights: &[f32], x: &[f32]) -> Bytes {
    let mut out = bytes::BytesMut::new();
    shape.put_dispatch(&mut out, ids, weights, x);
    out.freeze()
}

#[cfg(test)]
mod tests;
