//! Sends unary requests together with their end-of-stream flag.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http_body::Frame;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Bytes, Service, http};
use tonic::transport::Channel;

/// A channel for unary requests.
///
/// It replaces each body by a [`LookaheadBody`]. Without this, the client library detects the last
/// message only when it polls the body again after sending the message. It then sends the end of
/// the stream in a separate frame. For messages of 256 bytes or more, the separate frame costs a
/// separate write.
#[derive(Clone)]
pub(crate) struct UnaryChannel(pub(crate) Channel);

impl Service<http::Request<Body>> for UnaryChannel {
    type Response = <Channel as Service<http::Request<Body>>>::Response;
    type Error = <Channel as Service<http::Request<Body>>>::Error;
    type Future = <Channel as Service<http::Request<Body>>>::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        self.0.call(
            request.map(|body| Body::new(LookaheadBody { body, next: None, has_ended: false })),
        )
    }
}

/// A body that reads one frame ahead. If the inner body reports its end at once, `is_end_stream` is
/// already true when the last frame is returned. If not, the end is a separate frame.
struct LookaheadBody {
    body: Body,
    next: Option<Result<Frame<Bytes>, Status>>,
    has_ended: bool,
}

impl http_body::Body for LookaheadBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = match self.next.take() {
            Some(frame) => frame,
            None if self.has_ended => return Poll::Ready(None),
            None => match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(frame) => frame,
                None => {
                    self.has_ended = true;
                    return Poll::Ready(None);
                }
            },
        };
        if !self.has_ended
            && let Poll::Ready(next) = Pin::new(&mut self.body).poll_frame(cx)
        {
            self.has_ended = next.is_none();
            self.next = next;
        }
        Poll::Ready(Some(frame))
    }

    fn is_end_stream(&self) -> bool {
        self.has_ended && self.next.is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::future::poll_fn;

    use http_body::Body as _;

    use super::*;

    /// A body that reports its end only when it is polled again, sometimes after a `Pending`.
    struct FrameSequence(VecDeque<Poll<&'static str>>);

    impl http_body::Body for FrameSequence {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            match self.0.pop_front() {
                Some(Poll::Ready(part)) => {
                    Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(part.as_bytes())))))
                }
                Some(Poll::Pending) => {
                    cx.waker().wake_by_ref();
                    Poll::Pending
                }
                None => Poll::Ready(None),
            }
        }
    }

    /// Returns each frame, and whether the body reports its end directly after this frame.
    async fn frames_of(parts: impl Into<VecDeque<Poll<&'static str>>>) -> Vec<(Bytes, bool)> {
        let body = Body::new(FrameSequence(parts.into()));
        let mut lookahead = LookaheadBody { body, next: None, has_ended: false };
        let mut frames = Vec::new();
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut lookahead).poll_frame(cx)).await {
            frames.push((frame.unwrap().into_data().unwrap(), lookahead.is_end_stream()));
        }
        assert!(lookahead.is_end_stream());
        frames
    }

    #[tokio::test]
    async fn a_message_is_sent_with_its_end_flag() {
        assert_eq!(frames_of([Poll::Ready("a")]).await, [("a".into(), true)]);
        assert_eq!(frames_of([Poll::Pending, Poll::Ready("a")]).await, [("a".into(), true)]);
    }

    #[tokio::test]
    async fn every_frame_is_sent_once() {
        let expected = [("a".into(), false), ("b".into(), true)];
        assert_eq!(frames_of([Poll::Ready("a"), Poll::Ready("b")]).await, expected);
        assert_eq!(frames_of([Poll::Ready("a"), Poll::Pending, Poll::Ready("b")]).await, expected);
        assert_eq!(frames_of([Poll::Ready("a"), Poll::Pending]).await, [("a".into(), false)]);
        assert_eq!(frames_of([]).await, []);
    }
}
