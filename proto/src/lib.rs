//! What crosses a process boundary: the gRPC schemas and their generated code, the frames of the expert hop, the links that carry
//! them, the attention side ([`hop::HostHop`](crate)) and the expert side of the hop, and membership.

#![forbid(unsafe_code)]

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
