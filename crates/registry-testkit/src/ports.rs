//! Free loopback ports that stay free until the server that a test starts has taken them.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use tokio::net::{TcpListener, TcpSocket};

/// A TCP port on 127.0.0.1 that the operating system gives to nobody else while this value lives.
///
/// Asking for port 0, noting the number and closing the socket leaves a gap in which another test may get the same
/// number. Here a socket stays bound and never listens: until somebody does, connecting is refused, and any program
/// that sets `SO_REUSEADDR` before it binds, as servers do in order to restart, can take the port by its number. The same
/// server can be stopped and started again and again on it.
#[derive(Debug)]
pub struct Port {
    reserved: TcpSocket,
    number: u16,
}

impl Port {
    /// Reserves a free port.
    ///
    /// # Errors
    /// The operating system's, when it has no port or no socket left.
    pub fn reserve() -> io::Result<Self> {
        let reserved = bound(0)?;
        let number = reserved.local_addr()?.port();
        Ok(Self { reserved, number })
    }

    /// The port's number.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.number
    }

    /// The address to connect to.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.number).into()
    }

    /// Listens on this port. Dropping the listener makes the port refuse again; it stays reserved.
    ///
    /// # Errors
    /// The operating system's; somebody listens here already, most likely.
    ///
    /// # Panics
    /// Outside a tokio runtime with I/O enabled.
    pub fn listen(&self) -> io::Result<TcpListener> {
        bound(self.number)?.listen(1_024)
    }

    /// Gives the port up, for a server that does not set `SO_REUSEADDR`. Another program may get it first.
    #[must_use]
    pub fn release(self) -> u16 {
        drop(self.reserved);
        self.number
    }
}

/// `127.0.0.1:NUMBER`
impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.addr().fmt(f)
    }
}

fn bound(number: u16) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    // Lets a second socket bind the same number as long as no more than one of them listens.
    socket.set_reuseaddr(true)?;
    socket.bind((Ipv4Addr::LOCALHOST, number).into())?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::io::ErrorKind;
    use std::net::{TcpListener as StdListener, TcpStream as StdStream};

    use super::*;

    #[test]
    fn reserved_ports_are_distinct_and_refuse() {
        let ports: Vec<Port> = (0..200).map(|_| Port::reserve().unwrap()).collect();
        let numbers: HashSet<u16> = ports.iter().map(Port::number).collect();
        assert_eq!(numbers.len(), ports.len());
        let refused = StdStream::connect(ports[0].addr()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    }

    #[test]
    fn a_server_can_take_a_reserved_port_again_and_again() {
        let port = Port::reserve().unwrap();
        for _ in 0..3 {
            let server = StdListener::bind(port.addr()).unwrap();
            let client = StdStream::connect(port.addr()).unwrap();
            // The server closes first and leaves TIME_WAIT behind, which is what a restart meets.
            drop(server.accept().unwrap());
            drop((server, client));
            let refused = StdStream::connect(port.addr()).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        }
    }

    #[tokio::test]
    async fn two_cannot_listen_on_one_port() {
        let port = Port::reserve().unwrap();
        let _first = port.listen().unwrap();
        assert_eq!(port.listen().unwrap_err().kind(), ErrorKind::AddrInUse);
    }
}
