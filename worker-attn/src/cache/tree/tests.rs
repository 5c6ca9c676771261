//! The tree against a plain list of what is remembered.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

/// One remembered point: its tokens, and the tree's id.
struct Kept {
    tokens: Vec<u32>,
    id: PointId,
}

/// Every page that the tokens of some kept point lead over, by those tokens.
fn paths(kept: &[Kept], page_tokens: usize) -> HashSet<Vec<u32>> {
    kept.iter().flat_map(|k| (1..=k.tokens.len() / page_tokens).map(move |p| k.tokens[..p * page_tokens].to_vec())).collect()
}

#[derive(Clone, Debug)]
enum Op {
    Insert(Vec<u32>),
    Find(Vec<u32>, usize),
    Touch(usize),
    RemoveOldest,
    Remove(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    // Two letters and short words: prefixes are shared all the time.
    let word = || prop::collection::vec(0u32..2, 1..14);
    let op = prop_oneof![
        4 => word().prop_map(Op::Insert),
        4 => (word(), 0usize..14).prop_map(|(w, limit)| Op::Find(w, limit)),
        1 => (0usize..100).prop_map(Op::Touch),
        1 => Just(Op::RemoveOldest),
        1 => (0usize..100).prop_map(Op::Remove),
    ];
    prop::collection::vec(op, 1..80)
}

proptest! {
    #[test]
    fn the_tree_is_the_list(page_tokens in 1usize..5, ops in ops()) {
        let mut tree: Tree<Vec<u32>> = Tree::new(page_tokens);
        // In order of use.
        let mut kept: Vec<Kept> = Vec::new();
        let mut held: HashSet<u32> = HashSet::new();
        let mut page_of: HashMap<Vec<u32>, u32> = HashMap::new();
        let mut next_page = 0;
        for op in ops {
            match op {
                Op::Insert(tokens) if kept.iter().any(|k| k.tokens == tokens) => {
                    prop_assert_eq!(tree.find(&tokens, tokens.len()).point.map(|p| p.1), Some(tokens.len()));
                }
                Op::Insert(tokens) => {
                    // A sequence that has pages of its own for all of it.
                    let pages: Vec<u32> = (0..(tokens.len() / page_tokens) as u32).map(|p| next_page + p).collect();
                    next_page += pages.len() as u32;
                    let known = paths(&kept, page_tokens);
                    let taken = tree.insert(&tokens, &pages, tokens.clone());
                    let new: Vec<u32> = (0..pages.len()).filter(|p| !known.contains(&tokens[..(p + 1) * page_tokens])).map(|p| pages[p]).collect();
                    prop_assert_eq!(&taken, &new, "exactly the pages whose tokens were unknown");
                    for (p, page) in pages.iter().enumerate().filter(|(_, page)| taken.contains(page)) {
                        page_of.insert(tokens[..(p + 1) * page_tokens].to_vec(), *page);
                        prop_assert!(held.insert(*page));
                    }
                    let id = tree.find(&tokens, tokens.len()).point.unwrap().0;
                    kept.push(Kept { tokens, id });
                }
                Op::Find(tokens, limit) => {
                    let found = tree.find(&tokens, limit);
                    let best = kept.iter().filter(|k| k.tokens.len() <= limit && tokens.starts_with(&k.tokens)).max_by_key(|k| k.tokens.len());
                    prop_assert_eq!(found.point, best.map(|k| (k.id, k.tokens.len())));
                    prop_assert_eq!(found.matched, kept.iter().map(|k| common(&k.tokens, &tokens)).max().unwrap_or(0));
                    let pages: Vec<u32> = best.iter().flat_map(|k| (1..=k.tokens.len() / page_tokens).map(|p| page_of[&k.tokens[..p * page_tokens]])).collect();
                    prop_assert_eq!(found.pages, pages);
                    if let Some((id, _)) = found.point {
                        prop_assert_eq!(tree.saved(id), best.map(|k| &k.tokens));
                    }
                }
                Op::Touch(_) | Op::Remove(_) | Op::RemoveOldest if kept.is_empty() => {}
                Op::Touch(at) => {
                    let k = kept.remove(at % kept.len());
                    tree.touch(k.id);
                    kept.push(k);
                }
                Op::RemoveOldest | Op::Remove(_) => {
                    let at = if let Op::Remove(at) = op { at % kept.len() } else { 0 };
                    prop_assert_eq!(tree.oldest().next(), Some(kept[0].id));
                    let k = kept.remove(at);
                    let only: HashSet<u32> = tree.only_for(k.id).into_iter().collect();
                    let (saved, released) = tree.remove(k.id).unwrap();
                    prop_assert_eq!(saved, k.tokens);
                    prop_assert_eq!(&released.iter().copied().collect::<HashSet<u32>>(), &only);
                    for page in released {
                        prop_assert!(held.remove(&page), "page {} is let go once", page);
                    }
                    let alive = paths(&kept, page_tokens);
                    page_of.retain(|path, _| alive.contains(path));
                }
            }
            prop_assert_eq!(tree.oldest().collect::<Vec<_>>(), kept.iter().map(|k| k.id).collect::<Vec<_>>());
            prop_assert_eq!(tree.len(), kept.len());
            // A page is held exactly while a point lies on it or behind it.
            let pages: HashSet<u32> = tree.pages().collect();
            prop_assert_eq!(&pages, &page_of.values().copied().collect::<HashSet<u32>>());
            prop_assert_eq!(&pages, &held);
        }
    }
}

#[test]
fn without_pages_only_points_are_kept() {
    let mut tree = Tree::new(2);
    assert_eq!(tree.insert(&[1, 2, 3], &[], "a"), [] as [u32; 0]);
    let found = tree.find(&[1, 2, 3, 4], 3);
    assert_eq!((found.point.map(|p| p.1), found.pages.len(), found.matched), (Some(3), 0, 3));
}
