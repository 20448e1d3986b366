//! Free loopback ports that stay reserved while servers of a test start and stop on them.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use tokio::net::{TcpListener, TcpSocket};

/// A reserved TCP port on 127.0.0.1. The operating system assigns it to no other program while this
/// value lives.
///
/// Binding port 0, reading the number and closing the socket leaves a gap in which another test may
/// get the same number. Here a socket stays bound and never listens. Until a server listens, the
/// port refuses connections. A program can bind the port if it sets `SO_REUSEADDR` first, as most
/// servers do. Such a server can be stopped and started on the port repeatedly.
#[derive(Debug)]
pub struct Port {
    reserved: TcpSocket,
    number: u16,
}

impl Port {
    /// Reserves a free port.
    pub fn reserve() -> io::Result<Self> {
        let reserved = bind_socket(0)?;
        let number = reserved.local_addr()?.port();
        Ok(Self { reserved, number })
    }

    /// Returns the port number.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Returns the address to connect to.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.number).into()
    }

    /// Listens on this port. After the listener is dropped, the port refuses connections again and
    /// stays reserved.
    ///
    /// # Panics
    /// Panics outside a tokio runtime with I/O enabled.
    pub fn listen(&self) -> io::Result<TcpListener> {
        bind_socket(self.number)?.listen(1_024)
    }

    /// Releases the port, for a server that does not set `SO_REUSEADDR`. Another program may bind
    /// it first.
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

fn bind_socket(number: u16) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    // With this option, a second socket can bind the same port as long as at most one of them
    // listens.
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
            // The server closes first and leaves a TIME_WAIT state, as before a restart.
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
