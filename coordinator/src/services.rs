//! What workers dial: control.v1 (membership) and attn.v1 (requests and events), on one gRPC server.

use std::sync::Arc;

use tandem_proto::attn::v1::attn_server::AttnServer;
use tandem_proto::control::v1::control_server::ControlServer;
use tandem_runtime::Shutdown;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

use crate::cluster::Cluster;

pub(crate) mod attn;
pub(crate) mod control;

/// The cluster, once the checkpoint is open and the plan is made. Workers that dial earlier wait for it.
pub(crate) type ClusterWatch = watch::Receiver<Option<Arc<Cluster>>>;

/// Largest message from a worker: one step's events of a full batch, with the logprobs of the whole vocabulary for each token.
const LARGEST_MESSAGE: usize = 1 << 30;

/// Serves both until the future is dropped. `shutdown` is what an operator's drain sets off.
pub(crate) async fn serve(listener: TcpListener, cluster: ClusterWatch, shutdown: Shutdown) -> Result<(), tonic::transport::Error> {
    // Through TcpIncoming, because `Server::tcp_nodelay` has no effect on streams that the server did not accept itself.
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    Server::builder()
        .add_service(ControlServer::new(control::ControlService::new(cluster.clone(), shutdown)))
        .add_service(AttnServer::new(attn::AttnService::new(cluster)).max_decoding_message_size(LARGEST_MESSAGE))
        .serve_with_incoming(incoming)
        .await
}

/// Waits for the cluster; an error if the coordinator ends first.
pub(crate) async fn wait_for_cluster(watch: &mut ClusterWatch) -> Result<Arc<Cluster>, tonic::Status> {
    let gone = || tonic::Status::unavailable("the coordinator is shutting down");
    let cluster = watch.wait_for(Option::is_some).await.map_err(|_| gone())?;
    cluster.clone().ok_or_else(gone)
}
