//! The route table as plain Rust: which workers hold which shard, and where they listen. The coordinator pushes it
//! ([`crate::membership`]), the attention side dials from it ([`crate::hop`]).

use std::collections::HashSet;
use std::ops::Range;
use std::str::FromStr;

use crate::control::v1 as wire;
use crate::link::LinkKind;

/// Shard id → holders. Equal (coordinator epoch, version) means equal content: a version is never reused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouteTable {
    /// Epoch of the coordinator process that made the table; 0 before any table arrived.
    pub coordinator_epoch: u64,
    /// Version within that epoch, ascending; 0 before any table arrived.
    pub version: u32,
    /// One entry per shard of the plan, ascending by shard id.
    pub routes: Vec<Route>,
}

/// A shard and who holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// What the shard covers.
    pub shard: ShardDesc,
    /// In order of preference; empty when nobody holds it now.
    pub holders: Vec<Holder>,
}

/// Layers × experts × a slice of the intermediate dimension; half-open ranges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardDesc {
    /// Shard id, unique in the plan.
    pub id: u32,
    /// MoE layers, ascending.
    pub layers: Vec<Range<u32>>,
    /// Experts.
    pub experts: Range<u32>,
    /// Columns of the intermediate dimension.
    pub ffn: Range<u32>,
}

/// A worker that holds a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Worker name.
    pub worker: String,
    /// Epoch of its process: another epoch is another process, whatever its address.
    pub epoch: u64,
    /// Name of its arithmetic: only equal names may serve one running sequence by default.
    pub arithmetic: String,
    /// Host identity.
    pub host: String,
    /// Where it serves the hop, one per link kind. Addresses of unknown kinds are left out.
    pub addresses: Vec<Address>,
    /// Its weights are loaded.
    pub ready: bool,
    /// The attention worker itself: nothing to dial.
    pub local: bool,
}

impl Holder {
    /// The address for a link kind.
    pub fn address(&self, link: LinkKind) -> Option<&str> {
        self.addresses.iter().find(|a| a.link == link).map(|a| a.addr.as_str())
    }
}

/// Where a worker listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Transport.
    pub link: LinkKind,
    /// `host:port`.
    pub addr: String,
}

/// A route table that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// A route without a shard.
    #[error("route table {version}: route {index} names no shard")]
    NoShard {
        /// Table version.
        version: u32,
        /// Index of the route.
        index: usize,
    },
    /// A shard that appears twice.
    #[error("route table {version}: shard {shard} appears twice")]
    DuplicateShard {
        /// Table version.
        version: u32,
        /// Shard id.
        shard: u32,
    },
    /// A shard that covers nothing, or whose ranges run backwards.
    #[error("route table {version}: shard {shard}: {field} is {start}..{end}; needed a non-empty range")]
    EmptyRange {
        /// Table version.
        version: u32,
        /// Shard id.
        shard: u32,
        /// `layers`, `experts` or `ffn`.
        field: &'static str,
        /// Start.
        start: u32,
        /// End.
        end: u32,
    },
    /// A holder that cannot be told apart or reached.
    #[error("route table {version}: shard {shard}: holder {worker:?}: {reason}")]
    Holder {
        /// Table version.
        version: u32,
        /// Shard id.
        shard: u32,
        /// Worker name.
        worker: String,
        /// What is missing.
        reason: &'static str,
    },
    /// The version was used for another content.
    #[error("route table {version} of coordinator epoch {epoch:#x} arrived twice with different content")]
    VersionReused {
        /// Coordinator epoch.
        epoch: u64,
        /// Table version.
        version: u32,
    },
    /// A table older than the one in use.
    #[error("route table {got} is older than {have}, which is in use")]
    Older {
        /// Version in use.
        have: u32,
        /// Version that arrived.
        got: u32,
    },
}

impl RouteTable {
    /// Reads and validates the wire form.
    ///
    /// # Errors
    /// [`RouteError`] naming shard, holder and field.
    pub fn from_wire(coordinator_epoch: u64, table: &wire::RouteTable) -> Result<Self, RouteError> {
        let version = table.version;
        let mut seen = HashSet::new();
        let mut routes = Vec::with_capacity(table.routes.len());
        for (index, route) in table.routes.iter().enumerate() {
            let shard = route.shard.as_ref().ok_or(RouteError::NoShard { version, index })?;
            let shard = ShardDesc::from_wire(shard);
            if !seen.insert(shard.id) {
                return Err(RouteError::DuplicateShard { version, shard: shard.id });
            }
            shard.check(version)?;
            let holders = route.holders.iter().map(|h| Holder::from_wire(version, shard.id, h)).collect::<Result<_, _>>()?;
            routes.push(Route { shard, holders });
        }
        routes.sort_by_key(|route| route.shard.id);
        Ok(Self { coordinator_epoch, version, routes })
    }

    /// The wire form.
    pub fn to_wire(&self) -> wire::RouteTable {
        let routes = self
            .routes
            .iter()
            .map(|route| wire::Route { shard: Some(route.shard.to_wire()), holders: route.holders.iter().map(Holder::to_wire).collect() });
        wire::RouteTable { version: self.version, routes: routes.collect() }
    }

    /// Whether `next` may replace this table: `Ok(true)` when it is newer, `Ok(false)` when it is the same one again. A table of
    /// another coordinator epoch always replaces, because a restarted coordinator counts from the start.
    ///
    /// # Errors
    /// [`RouteError::Older`], [`RouteError::VersionReused`].
    pub fn accepts(&self, next: &Self) -> Result<bool, RouteError> {
        if next.coordinator_epoch != self.coordinator_epoch || next.version > self.version {
            Ok(true)
        } else if next.version < self.version {
            Err(RouteError::Older { have: self.version, got: next.version })
        } else if next == self {
            Ok(false)
        } else {
            Err(RouteError::VersionReused { epoch: self.coordinator_epoch, version: self.version })
        }
    }

    /// The route of a shard.
    pub fn route(&self, shard: u32) -> Option<&Route> {
        self.routes.binary_search_by_key(&shard, |route| route.shard.id).ok().map(|i| &self.routes[i])
    }
}

impl ShardDesc {
    /// From the wire form; not validated.
    pub fn from_wire(shard: &wire::Shard) -> Self {
        let range = |r: &Option<wire::Range>| r.as_ref().map_or(0..0, |r| r.start..r.end);
        Self {
            id: shard.id,
            layers: shard.layers.iter().map(|r| r.start..r.end).collect(),
            experts: range(&shard.experts),
            ffn: range(&shard.ffn),
        }
    }

    /// The wire form.
    pub fn to_wire(&self) -> wire::Shard {
        let range = |r: &Range<u32>| wire::Range { start: r.start, end: r.end };
        wire::Shard {
            id: self.id,
            layers: self.layers.iter().map(range).collect(),
            experts: Some(range(&self.experts)),
            ffn: Some(range(&self.ffn)),
        }
    }

    /// Whether the shard covers any expert of `layer`.
    pub fn has_layer(&self, layer: u32) -> bool {
        self.layers.iter().any(|range| range.contains(&layer))
    }

    fn check(&self, version: u32) -> Result<(), RouteError> {
        let fields = self.layers.iter().map(|r| ("layers", r)).chain([("experts", &self.experts), ("ffn", &self.ffn)]);
        for (field, range) in fields {
            if range.start >= range.end {
                return Err(RouteError::EmptyRange { version, shard: self.id, field, start: range.start, end: range.end });
            }
        }
        if self.layers.is_empty() {
            return Err(RouteError::EmptyRange { version, shard: self.id, field: "layers", start: 0, end: 0 });
        }
        Ok(())
    }
}

impl Holder {
    fn from_wire(version: u32, shard: u32, holder: &wire::Holder) -> Result<Self, RouteError> {
        let fail = |reason| Err(RouteError::Holder { version, shard, worker: holder.worker.clone(), reason });
        if holder.worker.is_empty() {
            return fail("no worker name");
        }
        if holder.epoch == 0 {
            return fail("epoch is 0; needed the epoch of its Hello");
        }
        let addresses: Vec<Address> = holder.addresses.iter().filter_map(Address::from_wire).collect();
        if !holder.local && addresses.is_empty() {
            return fail("no address of a known link (tcp, grpc)");
        }
        Ok(Self {
            worker: holder.worker.clone(),
            epoch: holder.epoch,
            arithmetic: holder.arithmetic.clone(),
            host: holder.host.clone(),
            addresses,
            ready: holder.ready,
            local: holder.local,
        })
    }

    fn to_wire(&self) -> wire::Holder {
        wire::Holder {
            worker: self.worker.clone(),
            epoch: self.epoch,
            arithmetic: self.arithmetic.clone(),
            host: self.host.clone(),
            addresses: self.addresses.iter().map(Address::to_wire).collect(),
            ready: self.ready,
            local: self.local,
        }
    }
}

impl Address {
    /// From the wire form; `None` for a link kind of a later version.
    pub fn from_wire(address: &wire::Address) -> Option<Self> {
        Some(Self { link: LinkKind::from_str(&address.link).ok()?, addr: address.addr.clone() })
    }

    /// The wire form.
    pub fn to_wire(&self) -> wire::Address {
        wire::Address { link: self.link.to_string(), addr: self.addr.clone() }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table() -> impl Strategy<Value = RouteTable> {
        let holder = (1u64.., "[a-z]{1,8}", any::<[bool; 2]>()).prop_map(|(epoch, worker, [ready, local])| Holder {
            worker,
            epoch,
            arithmetic: "cpu-avx2".into(),
            host: "h".into(),
            addresses: vec![Address { link: LinkKind::Tcp, addr: "127.0.0.1:1".into() }],
            ready,
            local,
        });
        let route = (prop::collection::vec(holder, 0..3), 0u32..50, 1u32..50);
        (prop::collection::vec(route, 0..6), any::<(u64, u32)>()).prop_map(|(routes, (coordinator_epoch, version))| RouteTable {
            coordinator_epoch,
            version,
            routes: (0u32..)
                .zip(routes)
                .map(|(id, (holders, start, len))| {
                    let range = start..start + len;
                    Route { shard: ShardDesc { id, layers: vec![range.clone()], experts: range.clone(), ffn: range }, holders }
                })
                .collect(),
        })
    }

    proptest! {
        #[test]
        fn round_trip(table in table()) {
            prop_assert_eq!(RouteTable::from_wire(table.coordinator_epoch, &table.to_wire()), Ok(table));
        }
    }

    fn one() -> wire::RouteTable {
        let range = Some(wire::Range { start: 0, end: 4 });
        wire::RouteTable {
            version: 3,
            routes: vec![wire::Route {
                shard: Some(wire::Shard { id: 7, layers: vec![wire::Range { start: 1, end: 2 }], experts: range, ffn: range }),
                holders: vec![wire::Holder {
                    worker: "experts-0".into(),
                    epoch: 5,
                    addresses: vec![wire::Address { link: "tcp".into(), addr: "127.0.0.1:1".into() }],
                    ..Default::default()
                }],
            }],
        }
    }

    fn refused(change: impl FnOnce(&mut wire::RouteTable)) -> String {
        let mut table = one();
        change(&mut table);
        RouteTable::from_wire(1, &table).unwrap_err().to_string()
    }

    #[test]
    fn refusals_name_shard_and_field() {
        assert!(RouteTable::from_wire(1, &one()).is_ok());
        assert_eq!(refused(|t| t.routes[0].shard = None), "route table 3: route 0 names no shard");
        assert_eq!(refused(|t| t.routes.push(t.routes[0].clone())), "route table 3: shard 7 appears twice");
        let ffn = refused(|t| t.routes[0].shard.as_mut().unwrap().ffn = None);
        assert_eq!(ffn, "route table 3: shard 7: ffn is 0..0; needed a non-empty range");
        assert!(refused(|t| t.routes[0].shard.as_mut().unwrap().layers.clear()).contains("layers is 0..0"));
        assert!(refused(|t| t.routes[0].holders[0].epoch = 0).contains("\"experts-0\": epoch is 0"));
        assert!(refused(|t| t.routes[0].holders[0].worker.clear()).contains("no worker name"));
        assert!(refused(|t| t.routes[0].holders[0].addresses[0].link = "carrier-pigeon".into()).contains("no address"));
    }

    #[test]
    fn versions_only_rise_within_an_epoch() {
        let table = RouteTable::from_wire(1, &one()).unwrap();
        assert_eq!(table.accepts(&table), Ok(false));
        assert_eq!(table.accepts(&RouteTable { version: 4, ..table.clone() }), Ok(true));
        assert_eq!(table.accepts(&RouteTable { version: 2, ..table.clone() }), Err(RouteError::Older { have: 3, got: 2 }));
        let changed = RouteTable { routes: vec![], ..table.clone() };
        assert_eq!(table.accepts(&changed), Err(RouteError::VersionReused { epoch: 1, version: 3 }));
        assert_eq!(table.accepts(&RouteTable { coordinator_epoch: 2, version: 1, routes: vec![] }), Ok(true));
        assert_eq!(RouteTable::default().accepts(&table), Ok(true));
    }
}
