//! Which prefixes are remembered: a tree over token ids, one page of tokens per edge.
//!
//! Neighbours: `cache/mod.rs` gives it snapshots and pages and takes care of what it lets go; `policy.rs` says where points are made.
//!
//! A *point* is a position of a token sequence at which everything that does not lie in pages was saved. It hangs at the node that the
//! full pages before it lead to, with the tokens behind the last full page (its *tail*). A node stands for one full page and holds it for
//! as long as a point lies at it or below: a page that no point needs is of no use, since nobody could go on behind it.
//!
//! Children are found by their tokens themselves, not by a hash of them: a match is a match.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// A point of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PointId(u64);

type NodeId = u64;
const ROOT: NodeId = 0;

#[derive(Debug)]
struct Node {
    parent: NodeId,
    /// The page's tokens, which the parent knows it by.
    tokens: Arc<[u32]>,
    /// The page; none where the model keeps nothing per token.
    page: Option<u32>,
    children: HashMap<Arc<[u32]>, NodeId>,
    points: Vec<PointId>,
}

#[derive(Debug)]
struct Point<S> {
    node: NodeId,
    tail: Box<[u32]>,
    saved: S,
    /// When it was used last, in ticks of the tree.
    used: u64,
}

/// What the tree knows about a sequence of tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The deepest point that the tokens pass, with its position.
    pub point: Option<(PointId, usize)>,
    /// The full pages before that point.
    pub pages: Vec<u32>,
    /// How many of the tokens lead along some remembered path, whether or not a point lies there.
    pub matched: usize,
}

/// The tree; `S` is what a point saves.
#[derive(Debug)]
pub struct Tree<S> {
    page_tokens: usize,
    nodes: HashMap<NodeId, Node>,
    points: HashMap<PointId, Point<S>>,
    /// Points by when they were used last.
    order: BTreeMap<u64, PointId>,
    /// Source of node ids, point ids and ticks.
    next: u64,
}

impl<S> Tree<S> {
    /// An empty tree over pages of `page_tokens` tokens.
    pub fn new(page_tokens: usize) -> Self {
        let root = Node { parent: ROOT, tokens: Arc::from([]), page: None, children: HashMap::new(), points: Vec::new() };
        Self {
            page_tokens: page_tokens.max(1),
            nodes: HashMap::from([(ROOT, root)]),
            points: HashMap::new(),
            order: BTreeMap::new(),
            next: ROOT + 1,
        }
    }

    /// Points remembered.
    pub fn len(&self) -> usize {
        self.points.len()
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.points.is_empty()
    }

    /// All pages held.
    pub fn pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.nodes.values().filter_map(|node| node.page)
    }

    /// Points, the one that was used longest ago first.
    pub fn oldest(&self) -> impl Iterator<Item = PointId> + '_ {
        self.order.values().copied()
    }

    /// What a point saves.
    pub fn saved(&self, point: PointId) -> Option<&S> {
        self.points.get(&point).map(|p| &p.saved)
    }

    /// Looks `tokens` up; points behind position `limit` are passed over.
    pub fn find(&self, tokens: &[u32], limit: usize) -> Found {
        let mut found = Found::default();
        let (mut node, mut depth, mut pages) = (ROOT, 0, Vec::new());
        while let Some(here) = self.nodes.get(&node) {
            let (start, rest) = (depth * self.page_tokens, &tokens[depth * self.page_tokens..]);
            for (id, point) in here.points.iter().filter_map(|id| Some((*id, self.points.get(id)?))) {
                let (common, position) = (common(&point.tail, rest), start + point.tail.len());
                found.matched = found.matched.max(start + common);
                if common == point.tail.len() && position <= limit && found.point.is_none_or(|best| best.1 < position) {
                    found.point = Some((id, position));
                    found.pages.clone_from(&pages);
                }
            }
            match rest.get(..self.page_tokens).and_then(|key| here.children.get(key)) {
                Some(child) => {
                    pages.extend(self.nodes.get(child).and_then(|n| n.page));
                    (node, depth) = (*child, depth + 1);
                    found.matched = found.matched.max(depth * self.page_tokens);
                }
                None => {
                    let most = here.children.keys().map(|key| common(key, rest)).max().unwrap_or(0);
                    found.matched = found.matched.max(start + most);
                    break;
                }
            }
        }
        found
    }

    /// A point was used.
    pub fn touch(&mut self, point: PointId) {
        let tick = self.tick();
        if let Some(p) = self.points.get_mut(&point) {
            self.order.remove(&p.used);
            p.used = tick;
            self.order.insert(tick, point);
        }
    }

    /// Remembers a point behind `tokens`, the full pages of which are `pages`. The pages that the tree takes in are returned: it had
    /// none for their tokens. There must be no point there yet.
    pub fn insert(&mut self, tokens: &[u32], pages: &[u32], saved: S) -> Vec<u32> {
        let (mut node, mut taken) = (ROOT, Vec::new());
        let keys = tokens.chunks_exact(self.page_tokens);
        let tail = Box::from(keys.remainder());
        for (i, key) in keys.enumerate() {
            let known = self.nodes.get(&node).and_then(|n| n.children.get(key)).copied();
            node = known.unwrap_or_else(|| {
                let page = pages.get(i).copied();
                taken.extend(page);
                self.add_node(node, Arc::from(key), page)
            });
        }
        let (id, used) = (PointId(self.tick()), self.tick());
        self.points.insert(id, Point { node, tail, saved, used });
        self.order.insert(used, id);
        if let Some(n) = self.nodes.get_mut(&node) {
            n.points.push(id);
        }
        taken
    }

    fn add_node(&mut self, parent: NodeId, tokens: Arc<[u32]>, page: Option<u32>) -> NodeId {
        let id = self.tick();
        self.nodes.insert(id, Node { parent, tokens: Arc::clone(&tokens), page, children: HashMap::new(), points: Vec::new() });
        if let Some(p) = self.nodes.get_mut(&parent) {
            p.children.insert(tokens, id);
        }
        id
    }

    /// The pages that nothing but this point needs.
    pub fn only_for(&self, point: PointId) -> Vec<u32> {
        let mut pages = Vec::new();
        let Some(p) = self.points.get(&point) else { return pages };
        let (mut node, mut left) = (p.node, 1);
        while let Some(n) = self.nodes.get(&node).filter(|_| node != ROOT) {
            if n.points.len() + n.children.len() > left {
                break;
            }
            pages.extend(n.page);
            // Above, it is the child that would go.
            (node, left) = (n.parent, 1);
        }
        pages
    }

    /// Forgets a point: what it saved, and the pages that nothing else needs.
    pub fn remove(&mut self, point: PointId) -> Option<(S, Vec<u32>)> {
        let p = self.points.remove(&point)?;
        self.order.remove(&p.used);
        if let Some(n) = self.nodes.get_mut(&p.node) {
            n.points.retain(|id| *id != point);
        }
        let (mut node, mut pages) = (p.node, Vec::new());
        while node != ROOT && self.nodes.get(&node).is_some_and(|n| n.points.is_empty() && n.children.is_empty()) {
            let Some(gone) = self.nodes.remove(&node) else { break };
            pages.extend(gone.page);
            if let Some(parent) = self.nodes.get_mut(&gone.parent) {
                parent.children.remove(&gone.tokens);
            }
            node = gone.parent;
        }
        Some((p.saved, pages))
    }

    fn tick(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// Length of the common prefix.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests;
