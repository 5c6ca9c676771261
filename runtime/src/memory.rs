//! How much memory this process may still use: what the kernel says is available, and what the control groups that it is in leave of it.
//!
//! Pages of the file cache count as free in both, since they give way: weights that are mapped and were read before are such pages.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

/// What sets the bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bound {
    /// `MemAvailable` of the machine.
    Ram,
    /// A control group's limit.
    Group {
        /// Its folder below `/sys/fs/cgroup`.
        path: PathBuf,
        /// The limit in bytes.
        limit: u64,
    },
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ram => f.write_str("available memory of this machine"),
            Self::Group { path, limit } => write!(f, "left of the {limit} bytes of control group {}", path.display()),
        }
    }
}

/// Free memory and what bounds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Free {
    /// Bytes.
    pub bytes: u64,
    /// What sets them.
    pub bound: Bound,
}

/// What this process may still use; `None` where there is no `/proc/meminfo`.
pub fn free() -> Option<Free> {
    free_at(Path::new("/"))
}

/// The same below another root, for tests.
fn free_at(root: &Path) -> Option<Free> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let kib = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?.split_whitespace().next()?.parse::<u64>().ok()?;
    let ram = Free { bytes: kib.saturating_mul(1024), bound: Bound::Ram };
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let bounds = groups.lines().flat_map(|line| of_line(root, line));
    bounds.chain([ram]).min_by_key(|free| free.bytes)
}

/// The bounds of one line of `/proc/self/cgroup`: of the group itself and of all above it, since each limit holds for what is below.
/// Inside a container the file may name a path that is not mounted there: then the mount's own root is the group.
fn of_line(root: &Path, line: &str) -> Vec<Free> {
    let mut fields = line.splitn(3, ':');
    let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { return Vec::new() };
    let v2 = controllers.is_empty();
    let mount = if v2 {
        root.join("sys/fs/cgroup")
    } else if controllers.split(',').any(|c| c == "memory") {
        root.join("sys/fs/cgroup/memory")
    } else {
        return Vec::new();
    };
    let own = mount.join(path.trim_start_matches('/'));
    let own = if own.is_dir() { own } else { mount.clone() };
    own.ancestors().take_while(|dir| dir.starts_with(&mount)).filter_map(|dir| of_group(root, dir, v2)).collect()
}

fn of_group(root: &Path, dir: &Path, v2: bool) -> Option<Free> {
    let number = |name: &str| fs::read_to_string(dir.join(name)).ok()?.trim().parse::<u64>().ok();
    let (limit, used, cache) = if v2 {
        ("memory.max", "memory.current", "inactive_file ")
    } else {
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
    };
    // "max" in version 2 is no number; version 1 says nearly 2^63.
    let limit = number(limit).filter(|limit| *limit < 1 << 60)?;
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let cache = stat.lines().find_map(|line| line.strip_prefix(cache)).and_then(|n| n.trim().parse::<u64>().ok()).unwrap_or(0);
    let used = number(used).unwrap_or(0).saturating_sub(cache);
    let path = dir.strip_prefix(root.join("sys/fs/cgroup")).unwrap_or(dir);
    Some(Free { bytes: limit.saturating_sub(used), bound: Bound::Group { path: Path::new("/").join(path), limit } })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Root(PathBuf);

    impl Root {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("tandem-memory-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&root);
            let root = Self(root);
            root.put("proc/meminfo", "MemTotal: 100 kB\nMemAvailable:   4000 kB\n");
            root
        }

        fn put(&self, file: &str, text: &str) {
            let path = self.0.join(file);
            fs::create_dir_all(path.parent().expect("has one")).expect("writable");
            fs::write(path, text).expect("writable");
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn version_2_counts_every_group_above_and_gives_cache_back() {
        let root = Root::new("v2");
        root.put("proc/self/cgroup", "0::/a/b\n");
        root.put("sys/fs/cgroup/a/b/memory.max", "max\n");
        root.put("sys/fs/cgroup/a/memory.max", "1000000\n");
        root.put("sys/fs/cgroup/a/memory.current", "900000\n");
        root.put("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 300000\n");
        let free = free_at(&root.0).expect("known");
        assert_eq!((free.bytes, &free.bound), (400_000, &Bound::Group { path: "/a".into(), limit: 1_000_000 }));
        assert!(free.bound.to_string().contains("1000000 bytes of control group /a"), "{}", free.bound);
        root.put("sys/fs/cgroup/a/memory.max", "100000000\n");
        assert_eq!(free_at(&root.0).expect("known"), Free { bytes: 4_096_000, bound: Bound::Ram });
    }

    #[test]
    fn version_1_is_read_and_a_path_of_the_host_falls_back_to_the_mount() {
        let root = Root::new("v1");
        root.put("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n");
        root.put("sys/fs/cgroup/memory/memory.limit_in_bytes", "50000\n");
        root.put("sys/fs/cgroup/memory/memory.usage_in_bytes", "60000\n");
        assert_eq!(free_at(&root.0).expect("known").bytes, 0, "more than the limit is used");
        root.put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(free_at(&root.0).expect("known").bound, Bound::Ram);
        fs::remove_file(root.0.join("proc/meminfo")).expect("there");
        assert_eq!(free_at(&root.0), None);
    }

    #[test]
    fn this_machine_has_some() {
        assert!(free().is_some_and(|free| free.bytes > 0));
    }
}
