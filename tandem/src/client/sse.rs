//! Reads server-sent events from a byte stream that is cut anywhere.

/// Collects bytes and gives the `data:` payloads of complete events.
#[derive(Debug, Default)]
pub struct Events {
    pending: Vec<u8>,
}

impl Events {
    /// Takes the next bytes; gives the data of each event that they complete. Comments and other fields are passed over.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        self.pending.extend_from_slice(bytes);
        let mut data = Vec::new();
        while let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            if let Some(payload) = line.trim_end_matches(['\r', '\n']).strip_prefix("data:") {
                data.push(payload.strip_prefix(' ').unwrap_or(payload).to_owned());
            }
        }
        data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_cut_gives_the_same_events() {
        let text = ": keep-alive\n\ndata: {\"a\":1}\r\n\r\nevent: x\ndata:{\"b\":\"é\"}\n\ndata: [DONE]\n\n".as_bytes();
        for size in 1..text.len() {
            let mut events = Events::default();
            let got: Vec<String> = text.chunks(size).flat_map(|chunk| events.push(chunk)).collect();
            assert_eq!(got, ["{\"a\":1}", "{\"b\":\"é\"}", "[DONE]"], "pieces of {size}");
        }
    }
}
