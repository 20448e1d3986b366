import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.RandomAccessFile;
import java.io.Writer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessLock;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.framework.recipes.locks.InterProcessReadWriteLock;
import org.apache.curator.framework.recipes.locks.InterProcessSemaphoreV2;
import org.apache.curator.framework.recipes.locks.Lease;
import org.apache.curator.retry.ExponentialBackoffRetry;
import org.apache.zookeeper.data.Stat;

/**
 * A peer program of the tests: acquires a lock in ZooKeeper many times, with Curator itself. Spring Integration's
 * registry does the same.
 *
 * <p>It checks nothing. It writes the times of its critical sections to a journal, as peer.py does. To run it manually:
 *
 * <pre>
 * java -cp /usr/share/java/curator-recipes.jar:/usr/share/java/slf4j-simple.jar Curator.java --url zk://127.0.0.1:2181 \
 *     --path /SpringIntegration-LockRegistry/orders --sections 500 --journal journal --counter counter
 * … --path /locks/orders --once hold 5000
 * … --path /locks/orders --bench 2000
 * </pre>
 *
 * <p>With {@code --recipe read} or {@code --recipe write}, the lock is that half of an {@code InterProcessReadWriteLock}. With
 * {@code --recipe semaphore --take 2 --units 3}, it is that many units of an {@code InterProcessSemaphoreV2}.
 *
 * Each error ends the program with a status other than zero and the reason on its standard error.
 */
public class Curator {
    /** Returns the node of this process's claim: its session owns at most one child of {@code path}. */
    private static String ownNode(CuratorFramework client, String path) throws Exception {
        long session = client.getZookeeperClient().getZooKeeper().getSessionId();
        for (String child : client.getChildren().forPath(path)) {
            Stat stat = client.checkExists().forPath(path + "/" + child);
            if (stat != null && stat.getEphemeralOwner() == session) {
                return path + "/" + child;
            }
        }
        throw new IllegalStateException("this process has no node below " + path);
    }

    /** {@code take} units of a semaphore, acquired and released together as one lock. */
    private static class Units implements InterProcessLock {
        private final InterProcessSemaphoreV2 semaphore;
        private final int take;
        private Collection<Lease> leases;

        Units(InterProcessSemaphoreV2 semaphore, int take) {
            this.semaphore = semaphore;
            this.take = take;
        }

        @Override
        public void acquire() throws Exception {
            leases = semaphore.acquire(take);
        }

        @Override
        public boolean acquire(long time, TimeUnit unit) throws Exception {
            leases = semaphore.acquire(take, time, unit);
            return leases != null;
        }

        @Override
        public void release() {
            semaphore.returnAll(leases);
            leases = null;
        }

        @Override
        public boolean isAcquiredInThisProcess() {
            return leases != null;
        }
    }

    private static InterProcessLock newLock(CuratorFramework client, String path, Map<String, String> options) {
        String recipe = options.getOrDefault("recipe", "mutex");
        switch (recipe) {
            case "semaphore":
                return new Units(
                        new InterProcessSemaphoreV2(client, path, number(options, "units", 1)), number(options, "take", 1));
            case "mutex":
                return new InterProcessMutex(client, path);
            case "read":
                return new InterProcessReadWriteLock(client, path).readLock();
            case "write":
                return new InterProcessReadWriteLock(client, path).writeLock();
            default:
                throw new IllegalArgumentException("Curator.java: unknown recipe " + recipe);
        }
    }

    private static final int CONNECTION_MS = 15_000;

    public static void main(String[] arguments) {
        try {
            Map<String, String> options = parse(arguments);
            String hosts = required(options, "url").replaceFirst("^zk://", "");
            int session = number(options, "session-ms", 10_000);
            CuratorFramework client = CuratorFrameworkFactory.newClient(
                    hosts, session, CONNECTION_MS, new ExponentialBackoffRetry(100, 10));
            client.start();
            InterProcessLock lock = newLock(client, required(options, "path"), options);
            if (options.containsKey("once")) {
                once(client, lock, options);
            } else if (options.containsKey("bench")) {
                bench(lock, options);
            } else {
                runSections(client, lock, options);
            }
            client.close();
            // Does not wait for other threads, for example those of the client.
            System.exit(0);
        } catch (Throwable error) {
            error.printStackTrace();
            System.exit(1);
        }
    }

    private static void runSections(CuratorFramework client, InterProcessLock lock, Map<String, String> options) throws Exception {
        long offset = clockOffset();
        Path counter = Path.of(required(options, "counter"));
        String path = required(options, "path") + (lock instanceof Units ? "/leases" : "");
        int sections = number(options, "sections", 0);
        int holdMs = number(options, "hold-ms", 1);
        int pauseMs = number(options, "pause-ms", 4);
        client.blockUntilConnected();
        printLine("ready");
        if (options.containsKey("on-cue")) {
            waitForStart();
        }
        try (Writer journal = Files.newBufferedWriter(
                Path.of(required(options, "journal")), StandardOpenOption.CREATE, StandardOpenOption.APPEND)) {
            for (int section = 0; section < sections; section++) {
                long asked = System.nanoTime() + offset;
                lock.acquire();
                long entered = System.nanoTime() + offset;
                // Read, pause and write are one atomic step only under mutual exclusion.
                long count = Long.parseLong(Files.readString(counter).strip());
                Thread.sleep(holdMs);
                overwriteNumber(counter, count + 1);
                long token = client.checkExists().forPath(ownNode(client, path)).getCzxid();
                long leaving = System.nanoTime() + offset;
                lock.release();
                long left = System.nanoTime() + offset;
                journal.write(String.format(
                        "{\"client\":%d,\"asked\":%d,\"entered\":%d,\"leaving\":%d,\"left\":%d,\"token\":%d}%n",
                        ProcessHandle.current().pid(), asked, entered, leaving, left, token));
                journal.flush();
                TimeUnit.MICROSECONDS.sleep(ThreadLocalRandom.current().nextInt(pauseMs * 1000 + 1));
            }
        }
        printLine("done");
    }

    /** Replaces the number in one write: a concurrent reader can read an old number, but never a part of a number. */
    private static void overwriteNumber(Path counter, long count) throws Exception {
        try (RandomAccessFile file = new RandomAccessFile(counter.toFile(), "rw")) {
            file.write(String.format("%10d", count).getBytes(StandardCharsets.US_ASCII));
        }
    }

    /** For each line of input, runs that number of pairs of acquire and release, and prints their duration in nanoseconds. */
    private static void bench(InterProcessLock lock, Map<String, String> options) throws Exception {
        runPairs(lock, number(options, "bench", 0));
        printLine("ready");
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            printLine(Long.toString(runPairs(lock, Integer.parseInt(line.strip()))));
        }
    }

    private static long runPairs(InterProcessLock lock, int count) throws Exception {
        long began = System.nanoTime();
        for (int pair = 0; pair < count; pair++) {
            lock.acquire();
            lock.release();
        }
        return System.nanoTime() - began;
    }

    private static void once(CuratorFramework client, InterProcessLock lock, Map<String, String> options) throws Exception {
        String[] what = options.get("once").split(" ");
        if (what[0].equals("try")) {
            if (!lock.acquire(0, TimeUnit.MILLISECONDS)) {
                printLine("busy");
                return;
            }
            printLine("held");
        } else {
            client.blockUntilConnected();
            printLine("waiting");
            lock.acquire();
            printLine("held");
            if (what.length > 1) {
                Thread.sleep(Long.parseLong(what[1]));
            } else {
                new BufferedReader(new InputStreamReader(System.in)).readLine();
            }
        }
        lock.release();
        printLine("released");
    }

    /** Waits for a line of input. The end of the input means that the test has ended, so the process exits. */
    private static void waitForStart() throws InterruptedException {
        CountDownLatch cue = new CountDownLatch(1);
        Thread reader = new Thread(() -> {
            try {
                BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
                while (input.readLine() != null) {
                    cue.countDown();
                }
            } catch (java.io.IOException broken) {
                // Treated as the end of the input.
            }
            System.err.println("Curator.java: the input has ended");
            Runtime.getRuntime().halt(3);
        });
        reader.setDaemon(true);
        reader.start();
        cue.await();
    }

    /**
     * Returns the testkit's clock minus Java's: the time for which the machine was suspended since its start.
     * {@code /proc/uptime} shows the testkit's clock in hundredths of a second, so each reading yields only a lower and
     * an upper bound.
     */
    private static long clockOffset() throws Exception {
        Path uptime = Path.of("/proc/uptime");
        if (!Files.exists(uptime)) {
            return 0;
        }
        long lower = Long.MIN_VALUE;
        long upper = Long.MAX_VALUE;
        for (int reading = 0; reading < 1_000; reading++) {
            long before = System.nanoTime();
            long bootTime = Math.round(Double.parseDouble(Files.readString(uptime).split(" ")[0]) * 100) * 10_000_000;
            long after = System.nanoTime();
            lower = Math.max(lower, bootTime - after);
            upper = Math.min(upper, bootTime + 10_000_000 - before);
        }
        // Usually the machine was never suspended.
        return lower <= 0 && 0 <= upper ? 0 : lower;
    }

    private static void printLine(String line) {
        System.out.println(line);
        System.out.flush();
    }

    private static Map<String, String> parse(String[] arguments) {
        Map<String, String> options = new HashMap<>();
        List<String> flags = List.of("on-cue");
        List<String> known = List.of(
                "url", "path", "recipe", "units", "take", "session-ms", "sections", "journal", "counter", "hold-ms", "pause-ms", "once", "bench");
        for (int at = 0; at < arguments.length; at++) {
            String name = arguments[at].replaceFirst("^--", "");
            if (flags.contains(name)) {
                options.put(name, "");
            } else if (known.contains(name) && at + 1 < arguments.length) {
                String value = arguments[++at];
                if (name.equals("once") && at + 1 < arguments.length && arguments[at + 1].matches("\\d+")) {
                    value += " " + arguments[++at];
                }
                options.put(name, value);
            } else {
                throw new IllegalArgumentException("Curator.java: unknown or incomplete option " + arguments[at]);
            }
        }
        return options;
    }

    private static String required(Map<String, String> options, String name) {
        String value = options.get(name);
        if (value == null) {
            throw new IllegalArgumentException("Curator.java: --" + name + " is required");
        }
        return value;
    }

    private static int number(Map<String, String> options, String name, int otherwise) {
        String value = options.get(name);
        return value == null ? otherwise : Integer.parseInt(value);
    }
}
