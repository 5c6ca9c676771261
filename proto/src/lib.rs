//! What crosses a process boundary: the gRPC schemas and their generated code, the frames of the expert hop, the links that carry
//! them, both sides of the hop, and membership. Depends on nothing else of Tandem.
//!
//! | module | what |
//! |---|---|
//! | [`control`], [`attn`], [`experts`] | generated gRPC code (`cargo run -p tandem-proto-codegen`) |
//! | [`frame`], [`payload`] | the bytes of the expert hop |
//! | [`link`] | transports: tcp, grpc, inproc |
//! | [`hop`] | attention side ([`hop::HostHop`]) and expert side ([`hop::ExpertServer`]) |
//! | [`route_table`] | who holds which shard |
//! | [`telemetry`] | names of the metrics |
//! | [`membership`] | a worker's membership of an instance |

#![forbid(unsafe_code)]

mod backoff;
pub mod frame;
pub mod hop;
pub mod link;
pub mod membership;
pub mod payload;
pub mod route_table;
pub mod telemetry;

/// Membership: workers dial the coordinator (`tandem.control.v1`).
pub mod control {
    /// Version 1.
    #[allow(missing_docs, unused_qualifications, clippy::all, clippy::pedantic)]
    pub mod v1 {
        include!("generated/tandem.control.v1.rs");
    }
}

/// Requests to an attention worker and events back (`tandem.attn.v1`).
pub mod attn {
    /// Version 1.
    #[allow(missing_docs, unused_qualifications, clippy::all, clippy::pedantic)]
    pub mod v1 {
        include!("generated/tandem.attn.v1.rs");
    }
}

/// The gRPC transport of the expert hop (`tandem.experts.v1`).
pub mod experts {
    /// Version 1.
    #[allow(missing_docs, unused_qualifications, clippy::all, clippy::pedantic)]
    pub mod v1 {
        include!("generated/tandem.experts.v1.rs");
    }
}
