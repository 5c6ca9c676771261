//! The first frames of a data link: Hello from the attention side, Welcome (or Refuse) from the expert side. Whatever does not fit is
//! refused by name, by whichever side sees it first, and the other side is told.

use bytes::Bytes;
use prost::Message;

use crate::experts::v1::{Hello, Refuse};
use crate::frame::{Frame, FrameError, Header, Kind, VERSION};
use crate::link::{FrameSink, FrameSource, LinkError};

/// A data link that did not come up.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The transport failed.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// This side refuses the peer.
    #[error("{peer} is refused: {}", describe(.refuse))]
    Mismatch {
        /// Name of the peer.
        peer: String,
        /// What does not fit.
        refuse: Refuse,
    },
    /// The peer refuses this side.
    #[error("the peer refused this side: {}", describe(.refuse))]
    Refused {
        /// What does not fit.
        refuse: Refuse,
    },
    /// Another frame came first.
    #[error("the peer sent {got} where the handshake needs {needed}")]
    Unexpected {
        /// Frame kind needed.
        needed: &'static str,
        /// What came.
        got: String,
    },
}

fn describe(refuse: &Refuse) -> String {
    let hint = if refuse.hint.is_empty() { String::new() } else { format!(" ({})", refuse.hint) };
    format!("{} is {}; needed {}{hint}", refuse.field, refuse.got, refuse.needed)
}

/// Attention side: says `hello`, returns the expert side's Welcome, checked.
///
/// # Errors
/// [`HandshakeError`]; the link is of no use afterwards.
pub async fn offer(sink: &mut impl FrameSink, source: &mut impl FrameSource, hello: &Hello) -> Result<Hello, HandshakeError> {
    sink.send(message(Kind::Hello, hello)).await?;
    let welcome = receive(sink, source, Kind::Welcome, "a Welcome").await?;
    conclude(sink, check_welcome(hello, &welcome), &welcome.name).await?;
    Ok(welcome)
}

/// Expert side: takes the Hello, checked against `mine`, and answers with `welcome` of it, to which it adds the other side's epoch.
///
/// # Errors
/// [`HandshakeError`]; the link is of no use afterwards.
pub async fn answer(
    sink: &mut impl FrameSink,
    source: &mut impl FrameSource,
    mine: &Hello,
    welcome: impl FnOnce(&Hello) -> Hello,
) -> Result<Hello, HandshakeError> {
    let hello = receive(sink, source, Kind::Hello, "a Hello").await?;
    conclude(sink, check_hello(mine, &hello), &hello.name).await?;
    let welcome = Hello { peer_epoch: hello.epoch, ..welcome(&hello) };
    sink.send(message(Kind::Welcome, &welcome)).await?;
    Ok(hello)
}

async fn conclude(sink: &mut impl FrameSink, checked: Result<(), Refuse>, peer: &str) -> Result<(), HandshakeError> {
    let Err(refuse) = checked else { return Ok(()) };
    // The peer may be gone already; what counts is this side's own error.
    let _ = sink.send(message(Kind::Refuse, &refuse)).await;
    sink.close().await;
    Err(HandshakeError::Mismatch { peer: if peer.is_empty() { "the peer".into() } else { peer.into() }, refuse })
}

async fn receive(
    sink: &mut impl FrameSink,
    source: &mut impl FrameSource,
    kind: Kind,
    needed: &'static str,
) -> Result<Hello, HandshakeError> {
    let frame = match source.recv().await {
        Ok(Some(frame)) => frame,
        Ok(None) => return Err(HandshakeError::Unexpected { needed, got: "the end of the stream".into() }),
        Err(LinkError::Frame(error @ FrameError::Version { got })) => {
            let hint = "run the same tandem version on both sides".to_owned();
            let refuse = Refuse { field: "frame version".into(), needed: VERSION.to_string(), got: got.to_string(), hint };
            let _ = sink.send(message(Kind::Refuse, &refuse)).await;
            return Err(LinkError::Frame(error).into());
        }
        Err(error) => return Err(error.into()),
    };
    let undecodable = |error: prost::DecodeError| HandshakeError::Unexpected { needed, got: format!("one that is not protobuf ({error})") };
    match frame.header.kind {
        got if got == kind => Hello::decode(frame.payload).map_err(undecodable),
        Kind::Refuse => Err(HandshakeError::Refused { refuse: Refuse::decode(frame.payload).map_err(undecodable)? }),
        got => Err(HandshakeError::Unexpected { needed, got: format!("{got:?}") }),
    }
}

fn message(kind: Kind, message: &impl Message) -> Frame {
    Frame { header: Header::new(kind), payload: Bytes::from(message.encode_to_vec()) }
}

/// What the expert side demands of a Hello.
fn check_hello(mine: &Hello, hello: &Hello) -> Result<(), Refuse> {
    check_common(mine, hello)?;
    if hello.peer_epoch != 0 && hello.peer_epoch != mine.epoch {
        return refuse("peer_epoch", mine.epoch, hello.peer_epoch, "the worker restarted: wait for a newer route table");
    }
    check_shards(hello, mine, &mine.shards, &hello.shards)?;
    if hello.max_rows > mine.max_rows {
        return refuse("max_rows", format!("at most {}", mine.max_rows), hello.max_rows, "lower the attention worker's token budget");
    }
    Ok(())
}

/// What the attention side demands of a Welcome.
fn check_welcome(mine: &Hello, welcome: &Hello) -> Result<(), Refuse> {
    check_common(mine, welcome)?;
    if mine.peer_epoch != 0 && welcome.epoch != mine.peer_epoch {
        return refuse("epoch", mine.peer_epoch, welcome.epoch, "another process answers at this address");
    }
    if welcome.peer_epoch != mine.epoch {
        return refuse("peer_epoch", mine.epoch, welcome.peer_epoch, "the Welcome answers another Hello");
    }
    check_shards(mine, welcome, &mine.shards, &welcome.shards)?;
    if welcome.max_rows < mine.max_rows {
        return refuse("max_rows", format!("at least {}", mine.max_rows), welcome.max_rows, "lower the attention worker's token budget");
    }
    Ok(())
}

fn check_common(mine: &Hello, theirs: &Hello) -> Result<(), Refuse> {
    if theirs.protocol_version != mine.protocol_version {
        return refuse("protocol_version", mine.protocol_version, theirs.protocol_version, "run the same tandem version on both sides");
    }
    if theirs.fingerprint != mine.fingerprint {
        return refuse("fingerprint", &mine.fingerprint, &theirs.fingerprint, "serve the same checkpoint on both sides");
    }
    if theirs.precision != mine.precision {
        return refuse("precision", &mine.precision, &theirs.precision, "give both sides the same --dtype");
    }
    if theirs.hidden != mine.hidden {
        return refuse("hidden", mine.hidden, theirs.hidden, "serve the same checkpoint on both sides");
    }
    if theirs.topk != mine.topk {
        return refuse("topk", mine.topk, theirs.topk, "serve the same checkpoint on both sides");
    }
    if theirs.epoch == 0 {
        return refuse("epoch", "not 0", 0, "");
    }
    if theirs.max_payload == 0 {
        return refuse("max_payload", "not 0", 0, "");
    }
    Ok(())
}

/// Every shard that `asking` wants is among those that `holding` has.
fn check_shards(asking: &Hello, holding: &Hello, mine: &[u32], theirs: &[u32]) -> Result<(), Refuse> {
    if asking.shards.iter().all(|shard| holding.shards.contains(shard)) {
        return Ok(());
    }
    refuse("shards", format!("{mine:?}"), format!("{theirs:?}"), "the worker holds other shards: wait for a newer route table")
}

fn refuse(field: &str, needed: impl ToString, got: impl ToString, hint: &str) -> Result<(), Refuse> {
    Err(Refuse { field: field.into(), needed: needed.to_string(), got: got.to_string(), hint: hint.into() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::{Link, inproc};

    fn attention() -> Hello {
        Hello {
            protocol_version: 1,
            name: "attn-0".into(),
            epoch: 10,
            peer_epoch: 20,
            fingerprint: "abc".into(),
            precision: "f32".into(),
            hidden: 64,
            topk: 4,
            shards: vec![1],
            max_rows: 100,
            max_payload: 1 << 20,
            credits: 4,
            ..Default::default()
        }
    }

    fn expert() -> Hello {
        Hello { name: "experts-0".into(), epoch: 20, peer_epoch: 0, shards: vec![0, 1], max_rows: 200, ..attention() }
    }

    async fn shake(hello: Hello, welcome: Hello) -> (Result<Hello, HandshakeError>, Result<Hello, HandshakeError>) {
        let (a, b) = inproc::pair();
        let ((mut a_sink, mut a_source), (mut b_sink, mut b_source)) = (a.split(), b.split());
        futures::join!(offer(&mut a_sink, &mut a_source, &hello), answer(&mut b_sink, &mut b_source, &welcome, |_| welcome.clone()))
    }

    #[tokio::test]
    async fn sides_that_fit_learn_about_each_other() {
        let (welcome, hello) = shake(attention(), expert()).await;
        assert_eq!(welcome.unwrap(), Hello { peer_epoch: 10, ..expert() });
        assert_eq!(hello.unwrap(), attention());
        let any_epoch = Hello { peer_epoch: 0, ..attention() };
        assert!(shake(any_epoch, expert()).await.0.is_ok());
    }

    #[tokio::test]
    async fn each_mismatch_is_named_on_both_sides() {
        type Change = fn(&mut Hello);
        let changes: [(&str, Change, &str, &str); 9] = [
            ("protocol_version", |h| h.protocol_version = 2, "2", "1"),
            ("fingerprint", |h| h.fingerprint = "xyz".into(), "xyz", "abc"),
            ("precision", |h| h.precision = "bf16".into(), "bf16", "f32"),
            ("hidden", |h| h.hidden = 65, "65", "64"),
            ("topk", |h| h.topk = 5, "5", "4"),
            ("epoch", |h| h.epoch = 0, "0", "not 0"),
            ("peer_epoch", |h| h.peer_epoch = 21, "21", "20"),
            ("shards", |h| h.shards.push(2), "[1, 2]", "[0, 1]"),
            ("max_rows", |h| h.max_rows = 201, "201", "at most 200"),
        ];
        for (field, change, got, needed) in changes {
            let mut hello = attention();
            change(&mut hello);
            let (offered, answered) = shake(hello, expert()).await;
            let text = format!("{field} is {got}; needed {needed}");
            let (offered, answered) = (offered.unwrap_err().to_string(), answered.unwrap_err().to_string());
            assert!(offered.starts_with(&format!("the peer refused this side: {text}")), "{offered}");
            assert!(answered.starts_with(&format!("attn-0 is refused: {text}")), "{answered}");
        }
    }

    #[test]
    fn the_attention_side_checks_the_welcome_itself() {
        let good = Hello { peer_epoch: 10, ..expert() };
        let field = |change: fn(&mut Hello)| {
            let mut welcome = good.clone();
            change(&mut welcome);
            check_welcome(&attention(), &welcome).map_err(|r| r.field)
        };
        assert_eq!(field(|_| ()), Ok(()));
        assert_eq!(field(|w| w.epoch = 21), Err("epoch".into()));
        assert_eq!(field(|w| w.peer_epoch = 11), Err("peer_epoch".into()));
        assert_eq!(field(|w| w.shards = vec![0]), Err("shards".into()));
        assert_eq!(field(|w| w.max_rows = 99), Err("max_rows".into()));
        assert_eq!(field(|w| w.fingerprint.clear()), Err("fingerprint".into()));
    }

    #[tokio::test]
    async fn another_first_frame_is_named() {
        let (a, b) = inproc::pair();
        let ((mut a_sink, _a_source), (mut b_sink, mut b_source)) = (a.split(), b.split());
        a_sink.send(Frame::bare(Header::new(Kind::Ping))).await.unwrap();
        let error = answer(&mut b_sink, &mut b_source, &expert(), |_| expert()).await.unwrap_err();
        assert_eq!(error.to_string(), "the peer sent Ping where the handshake needs a Hello");
    }
}
