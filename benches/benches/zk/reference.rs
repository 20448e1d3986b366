//! The minimum that a fair lock in ZooKeeper needs: create a sequential node, list the queue, watch
//! the predecessor, delete the node.

use zookeeper_client::{Acls, Client, CreateMode};

use crate::connect;

/// One contender for one lock.
pub struct ZkReference {
    client: Client,
    directory: String,
    node: Option<String>,
}

const NAME: &str = "_c_01234567-89ab-4def-8123-456789abcdef-lock-";

impl ZkReference {
    pub async fn connect(servers: &str, directory: &str) -> Self {
        let client = connect(servers).await;
        let persistent = CreateMode::Persistent.with_acls(Acls::anyone_all());
        client.mkdir(directory, &persistent).await.unwrap();
        Self { client, directory: directory.to_owned(), node: None }
    }

    /// Acquires the lock. Each request waits for the reply to the previous one.
    pub async fn lock(&mut self) {
        let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
        let prefix = format!("{}/{NAME}", self.directory);
        let (_, number) = self.client.create(&prefix, b"127.0.0.1", &options).await.unwrap();
        let children = self.client.list_children(&self.directory).await.unwrap();
        self.wait(&format!("{NAME}{number}"), children).await;
    }

    /// Acquires the lock. The create and list requests are sent together.
    pub async fn lock_pipelined(&mut self) {
        let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
        let prefix = format!("{}/{NAME}", self.directory);
        let created = self.client.create(&prefix, b"127.0.0.1", &options);
        let listed = self.client.list_children(&self.directory);
        let (_, number) = created.await.unwrap();
        let children = listed.await.unwrap();
        self.wait(&format!("{NAME}{number}"), children).await;
    }

    async fn wait(&mut self, name: &str, mut children: Vec<String>) {
        self.node = Some(format!("{}/{name}", self.directory));
        loop {
            let number = |name: &str| name[name.len() - 10..].to_owned();
            let before = children.iter().filter(|other| number(other) < number(name));
            let Some(predecessor) = before.max_by_key(|other| number(other)) else { return };
            let path = format!("{}/{predecessor}", self.directory);
            if let Ok((_, _, watcher)) = self.client.get_and_watch_data(&path).await {
                watcher.changed().await;
            }
            children = self.client.list_children(&self.directory).await.unwrap();
        }
    }

    pub async fn unlock(&mut self) {
        let node = self.node.take().unwrap();
        self.client.delete(&node, None).await.unwrap();
    }

    /// The two requests that every hand-over needs: a write, which goes to disk, and then a list of
    /// the queue.
    pub async fn write_and_list(&self) {
        self.client.set_data(&self.directory, b"", None).await.unwrap();
        self.client.list_children(&self.directory).await.unwrap();
    }
}
