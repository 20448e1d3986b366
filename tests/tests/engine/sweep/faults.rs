//! The faults of requests in the sweep, as plans for the faulty backend. `environments` defines how
//! soon a key must be free in spite of them.

use std::time::Duration;

use registry_conformance::{Fault, Faults, Operation};

/// Returns faults by which no message is lost: requests and replies are delayed, repeated or
/// refused, and wake-ups are lost or early.
pub(crate) fn delays() -> Vec<(&'static str, Faults)> {
    let ms = Duration::from_millis;
    let all = |fault| {
        [Operation::Acquire, Operation::Renew, Operation::Release]
            .into_iter()
            .fold(Faults::none(), |faults, operation| faults.always(operation, fault))
    };
    vec![
        ("slow requests", all(Fault::DelayRequest(ms(20)))),
        ("slow replies", all(Fault::DelayReply(ms(20)))),
        ("slow acquire", Faults::none().at_call(Operation::Acquire, 1, Fault::DelayReply(ms(300)))),
        ("repeated at once", all(Fault::Repeat)),
        ("acquire refused once", Faults::none().at_call(Operation::Acquire, 1, Fault::Refuse)),
        (
            "acquire refused twice, then slow",
            Faults::none()
                .at_call(Operation::Acquire, 1, Fault::Refuse)
                .at_call(Operation::Acquire, 2, Fault::Refuse)
                .at_call(Operation::Acquire, 3, Fault::DelayRequest(ms(50))),
        ),
        ("release refused once", Faults::none().at_call(Operation::Release, 1, Fault::Refuse)),
        ("no wake-ups", Faults::none().always(Operation::Wait, Fault::LoseWake)),
        ("early wake-ups", Faults::none().always(Operation::Wait, Fault::WakeEarly(ms(3)))),
    ]
}

/// Returns faults by which single messages are lost, while the store stays reachable.
pub(crate) fn transient_message_faults() -> Vec<(&'static str, Faults)> {
    let none = Faults::none;
    vec![
        ("acquire reply lost", none().at_call(Operation::Acquire, 1, Fault::LoseReply)),
        ("acquire lost", none().at_call(Operation::Acquire, 1, Fault::LoseRequest)),
        (
            "acquire reply lost three times",
            (1..=3)
                .fold(none(), |faults, n| faults.at_call(Operation::Acquire, n, Fault::LoseReply)),
        ),
        ("release reply lost", none().at_call(Operation::Release, 1, Fault::LoseReply)),
        ("release lost", none().at_call(Operation::Release, 1, Fault::LoseRequest)),
        (
            "acquire and release reply lost",
            none().at_call(Operation::Acquire, 1, Fault::LoseReply).at_call(
                Operation::Release,
                1,
                Fault::LoseReply,
            ),
        ),
    ]
}

/// The maximum delay of a late request. Longer than the engine waits for a reply.
pub(crate) const LATE: Duration = Duration::from_secs(12);

/// Returns faults by which all messages of a kind are lost, or messages arrive after their caller
/// has stopped waiting. The last value is the maximum delay of a request that still arrives.
pub(crate) fn persistent_message_faults() -> Vec<(&'static str, Faults, Duration)> {
    let none = Faults::none;
    let zero = Duration::ZERO;
    vec![
        ("no release arrives", none().always(Operation::Release, Fault::LoseRequest), zero),
        ("no release reply arrives", none().always(Operation::Release, Fault::LoseReply), zero),
        ("no renewal arrives", none().always(Operation::Renew, Fault::LoseRequest), zero),
        ("no renewal reply arrives", none().always(Operation::Renew, Fault::LoseReply), zero),
        (
            "acquire arrives late",
            none().at_call(Operation::Acquire, 1, Fault::DelayRequest(LATE)),
            LATE,
        ),
        (
            "acquire answers late",
            none().at_call(Operation::Acquire, 1, Fault::DelayReply(LATE)),
            LATE,
        ),
        (
            "release arrives late",
            none().at_call(Operation::Release, 1, Fault::DelayRequest(LATE)),
            LATE,
        ),
        (
            "release answers late",
            none().at_call(Operation::Release, 1, Fault::DelayReply(LATE)),
            LATE,
        ),
        (
            "renewal arrives late",
            none().at_call(Operation::Renew, 1, Fault::DelayRequest(LATE)),
            LATE,
        ),
        (
            "a grant that has expired when it arrives",
            none().at_call(Operation::Acquire, 1, Fault::DelayReply(Duration::from_secs(31))),
            Duration::from_secs(31),
        ),
        (
            "a repetition of the acquire arrives late",
            none().at_call(Operation::Acquire, 1, Fault::RepeatLate(Duration::from_millis(200))),
            Duration::from_millis(200),
        ),
        (
            "a repetition of the release arrives late",
            none().at_call(Operation::Release, 1, Fault::RepeatLate(LATE)),
            LATE,
        ),
    ]
}

/// Returns faults of every kind, each with a probability.
pub(crate) fn random_faults(seed: u64) -> Faults {
    let mut faults = Faults::seeded(seed);
    for operation in [Operation::Acquire, Operation::Renew, Operation::Release] {
        faults = faults
            .sometimes(operation, 0.15, Fault::LoseRequest)
            .sometimes(operation, 0.15, Fault::LoseReply)
            .sometimes(operation, 0.1, Fault::Refuse)
            .sometimes(operation, 0.1, Fault::Repeat)
            .sometimes(operation, 0.3, Fault::DelayRequest(Duration::from_millis(100)))
            .sometimes(operation, 0.3, Fault::DelayReply(Duration::from_millis(100)))
            .sometimes(operation, 0.05, Fault::DelayReply(Duration::from_secs(4)))
            .sometimes(operation, 0.05, Fault::DelayRequest(Duration::from_secs(4)));
    }
    faults.sometimes(Operation::Wait, 0.3, Fault::LoseWake).sometimes(
        Operation::Wait,
        0.3,
        Fault::WakeEarly(Duration::from_millis(50)),
    )
}
