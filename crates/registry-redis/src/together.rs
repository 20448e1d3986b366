//! Puts questions together that are asked of one server at the same time: one script answers many in a fraction of the time.
//!
//! Few at a time are asked one by one, because nobody is to wait for others without need. What comes while several are on their way is
//! collected, and asked together as soon as the collection before has been answered. That is done by a task of its own: whoever asks
//! may be polled late, and the others must not wait for that.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::Value;
use registry_core::BackendError;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::link::Link;
use crate::script::{Call, Script};
use crate::slot::slot;
use crate::store::unreadable;

/// What is asked about one lock: the same number of keys and of arguments each time.
pub(crate) struct Question {
    pub(crate) keys: Vec<String>,
    pub(crate) arguments: Vec<Vec<u8>>,
}

/// The questions that one script answers.
pub(crate) struct Together {
    link: Arc<Link>,
    script: &'static Script,
    /// Locks are spread over slots, and no script may touch two.
    clustered: bool,
    /// Those that are on their way one by one.
    alone: AtomicUsize,
    crowd: Mutex<Crowd>,
}

#[derive(Default)]
struct Crowd {
    waiting: Vec<Waiting>,
    /// There is a task that asks for them.
    served: bool,
}

impl Together {
    pub(crate) fn new(link: Arc<Link>, script: &'static Script, clustered: bool) -> Arc<Self> {
        let (alone, crowd) = (AtomicUsize::new(0), Mutex::default());
        Arc::new(Self { link, script, clustered, alone, crowd })
    }

    /// Asks about one lock.
    pub(crate) async fn ask(self: &Arc<Self>, question: Question) -> Result<Value, BackendError> {
        let alone = if self.clustered { None } else { Alone::begin(&self.alone) };
        if self.clustered || alone.is_some() {
            let answer = self.link.run(self.slot(&question), &self.call(&[&question])).await?;
            return Self::one(answer);
        }
        let (answer, answered) = oneshot::channel();
        let served = {
            let mut crowd = self.crowd();
            crowd.waiting.push(Waiting { question, since: Instant::now(), answer });
            std::mem::replace(&mut crowd.served, true)
        };
        if !served {
            tokio::spawn(Arc::clone(self).serve());
        }
        answered.await.unwrap_or_else(|_| Err(no_answer()))
    }

    /// Asks about one lock, and tells what is missing of the safety that was asked for.
    pub(crate) async fn ask_durably(
        &self,
        question: &Question,
    ) -> Result<(Value, Option<String>), BackendError> {
        let durable = self.link.run_durably(self.slot(question), &self.call(&[question])).await?;
        Ok((Self::one(durable.answer)?, durable.missing))
    }

    fn slot(&self, question: &Question) -> u16 {
        let key = question.keys.first().filter(|_| self.clustered);
        key.map_or(0, |key| slot(key))
    }

    /// Asks for all who wait, until nobody does.
    async fn serve(self: Arc<Self>) {
        let mut service = Service { together: &self, done: false };
        loop {
            let some = {
                let mut crowd = self.crowd();
                if crowd.waiting.is_empty() {
                    crowd.served = false;
                    service.done = true;
                    return;
                }
                let some = crowd.waiting.len().min(AT_ONCE);
                crowd.waiting.drain(..some).collect::<Vec<_>>()
            };
            // After a long time nobody counts on it any more, and an acquisition must not be made behind its asker's back.
            let (late, some): (Vec<_>, Vec<_>) =
                some.into_iter().partition(|waiting| waiting.since.elapsed() > PATIENCE);
            for waiting in late {
                let late = BackendError::transient("redis: the server is too slow");
                let _ = waiting.answer.send(Err(late.as_refused()));
            }
            let some: Vec<_> =
                some.into_iter().filter(|waiting| !waiting.answer.is_closed()).collect();
            if some.is_empty() {
                continue;
            }
            let questions: Vec<_> = some.iter().map(|waiting| &waiting.question).collect();
            let mut answers = match self.link.run(0, &self.call(&questions)).await {
                Ok(Value::Array(answers)) if answers.len() == questions.len() => {
                    Ok(answers.into_iter())
                }
                Ok(_) => Err(unreadable()),
                Err(error) => Err(error),
            };
            for waiting in some {
                let answer = match &mut answers {
                    Ok(answers) => answers.next().ok_or_else(unreadable),
                    Err(error) => Err(error.clone()),
                };
                // Whoever is not there any more has nothing to hear.
                let _ = waiting.answer.send(answer);
            }
        }
    }

    fn call(&self, questions: &[&Question]) -> Call<'static> {
        let keys: Vec<&str> = questions
            .iter()
            .flat_map(|question| question.keys.iter().map(String::as_str))
            .collect();
        let arguments = questions.iter().flat_map(|question| &question.arguments);
        arguments.fold(self.script.call(keys), |call, argument| call.arg(&argument[..]))
    }

    /// The answer to a single question.
    fn one(answer: Value) -> Result<Value, BackendError> {
        match answer {
            Value::Array(mut answers) if answers.len() == 1 => answers.pop().ok_or_else(unreadable),
            _ => Err(unreadable()),
        }
    }

    fn crowd(&self) -> MutexGuard<'_, Crowd> {
        self.crowd.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The task that asks for a crowd.
struct Service<'a> {
    together: &'a Together,
    done: bool,
}

impl Drop for Service<'_> {
    fn drop(&mut self) {
        if !self.done {
            // The runtime has ended: nobody is to wait for an answer.
            let mut crowd = self.together.crowd();
            crowd.served = false;
            crowd.waiting.clear();
        }
    }
}

/// A question that is to be asked with others.
struct Waiting {
    question: Question,
    since: Instant,
    answer: oneshot::Sender<Result<Value, BackendError>>,
}

/// One of few.
struct Alone<'a>(&'a AtomicUsize);

impl<'a> Alone<'a> {
    fn begin(alone: &'a AtomicUsize) -> Option<Self> {
        let room = |count: usize| (count < ALONE_MAX).then_some(count + 1);
        alone.fetch_update(Ordering::AcqRel, Ordering::Acquire, room).ok().map(|_| Self(alone))
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn no_answer() -> BackendError {
    BackendError::transient("redis: a question was not answered")
}

impl fmt::Debug for Together {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Together")
            .field("waiting", &self.crowd().waiting.len())
            .finish_non_exhaustive()
    }
}

/// How long a question may wait to be asked.
const PATIENCE: Duration = Duration::from_secs(1);
/// How many are asked one by one.
const ALONE_MAX: usize = 4;
/// How many are asked together: a server does nothing else meanwhile.
const AT_ONCE: usize = 64;
